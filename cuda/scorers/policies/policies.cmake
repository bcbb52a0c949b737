# kvpool_policies(<output folder> <registry.list>): makes kvpool_policies/all.h, which includes the header of every policy
# on the list and passes their types to a macro: KVPOOL_POLICIES(X) is X(PagedEviction) X(StreamingLlm) …, and
# KVPOOL_BLOCK_POLICIES(X) has those of them that the list marks with "blocks".
function(kvpool_policies folder list)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} names REGEX "^[a-z]")
  set(includes "")
  set(types "")
  set(block_types "")
  foreach(line ${names})
    string(REPLACE " " ";" columns ${line})
    list(GET columns 0 name)
    string(REPLACE "_" ";" words ${name})
    set(type "")
    foreach(word ${words})
      string(SUBSTRING ${word} 0 1 initial)
      string(SUBSTRING ${word} 1 -1 rest)
      string(TOUPPER ${initial} initial)
      string(APPEND type ${initial}${rest})
    endforeach()
    string(APPEND includes "#include \"cuda/scorers/policies/${name}.h\"\n")
    string(APPEND types " \\\n  X(${type})")
    if("blocks" IN_LIST columns)
      string(APPEND block_types " \\\n  X(${type})")
    endif()
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/kvpool_policies/all.h CONTENT
"// Made from cuda/scorers/policies/registry.list.
#ifndef KVPOOL_POLICIES_ALL_H_
#define KVPOOL_POLICIES_ALL_H_

@includes@
#define KVPOOL_POLICIES(X)@types@
#define KVPOOL_BLOCK_POLICIES(X)@block_types@

#endif  // KVPOOL_POLICIES_ALL_H_
" @ONLY)
endfunction()
