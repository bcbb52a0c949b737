# kvpool_policies(<output folder> <registry.list>): makes kvpool_policies/all.h, which includes the header of every policy
# on the list and passes their types to a macro: KVPOOL_POLICIES(X) is X(PagedEviction) X(StreamingLlm) ….
function(kvpool_policies folder list)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} names REGEX "^[a-z]")
  set(includes "")
  set(types "")
  foreach(name ${names})
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
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/kvpool_policies/all.h CONTENT
"// Made from cuda/scorers/policies/registry.list.
#ifndef KVPOOL_POLICIES_ALL_H_
#define KVPOOL_POLICIES_ALL_H_

@includes@
#define KVPOOL_POLICIES(X)@types@

#endif  // KVPOOL_POLICIES_ALL_H_
" @ONLY)
endfunction()
