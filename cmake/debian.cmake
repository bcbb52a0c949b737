# Debian packages: `cpack -G DEB` makes kvpoold, kvpool-tools, libkvpool0 and libkvpool-dev of what cmake/install.cmake installs and
# what only a Debian has, from deploy/debian. deploy/deb.sh builds and packs.
set(debian ${PROJECT_SOURCE_DIR}/deploy/debian)
set(made ${PROJECT_BINARY_DIR}/debian)
set(CPACK_PACKAGE_CONTACT "kvpool maintainers <maintainers@kvpool.invalid>")

# ---- Manual pages, of --help
set(pages)
function(kvpool_manual_page program section summary component)
  set(page ${made}/${program}.${section}.gz)
  add_custom_command(
    OUTPUT ${page}
    COMMAND sh -c "help2man --no-info --section=${section} --source=kvpool --version-string=${PROJECT_VERSION} \
--name='${summary}' $<TARGET_FILE:${program}> | gzip -9n >${page}"
    DEPENDS ${program} VERBATIM)
  set(pages ${pages} ${page} PARENT_SCOPE)
  install(FILES ${page} DESTINATION share/man/man${section} COMPONENT ${component}-debian EXCLUDE_FROM_ALL)
endfunction()
kvpool_manual_page(kvpoold 8 "owns the KV-cache memory of GPUs and leases it to LLM engines" kvpoold)
kvpool_manual_page(kvpoolctl 1 "ask and steer kvpoold" kvpool-tools)
kvpool_manual_page(kvpool-replay 1 "put load on a kvpoold, and prove its memory right" kvpool-tools)
kvpool_manual_page(kvpool-sim 1 "compare replacement policies on recorded requests" kvpool-tools)
kvpool_manual_page(kvpool-lab 1 "run pruning policies on tensors from a file" kvpool-tools)
configure_file(${debian}/changelog.in ${made}/changelog @ONLY)
add_custom_command(OUTPUT ${made}/changelog.gz COMMAND gzip -9nkf ${made}/changelog DEPENDS ${made}/changelog)
add_custom_target(kvpool_debian DEPENDS ${pages} ${made}/changelog.gz
  kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab kvpool_c kvpool_client)

# ---- Files that `cmake --install` leaves out: their paths are those of a Debian, whatever the prefix is.
function(kvpool_debian_file component file folder)
  install(FILES ${file} DESTINATION ${folder} COMPONENT ${component}-debian EXCLUDE_FROM_ALL ${ARGN})
endfunction()
kvpool_debian_file(kvpoold ${debian}/kvpoold.service /lib/systemd/system)
kvpool_debian_file(kvpoold ${debian}/access.conf /etc/kvpool)
kvpool_debian_file(kvpoold ${debian}/kvpoold.conf /etc/kvpool)
kvpool_debian_file(kvpoold ${debian}/sysusers.conf lib/sysusers.d RENAME kvpool.conf)
kvpool_debian_file(kvpool-tools ${debian}/completion.zsh share/zsh/vendor-completions RENAME _kvpool)
kvpool_debian_file(kvpool-tools ${debian}/completion.bash share/bash-completion/completions RENAME kvpoolctl)
file(MAKE_DIRECTORY ${made}/completions)
foreach(program kvpoold kvpool-replay kvpool-sim kvpool-lab)
  file(CREATE_LINK kvpoolctl ${made}/completions/${program} SYMBOLIC)
  kvpool_debian_file(kvpool-tools ${made}/completions/${program} share/bash-completion/completions)
endforeach()

set(components kvpoold kvpool-tools libkvpool0 libkvpool-dev)
foreach(component ${components})
  kvpool_debian_file(${component} ${debian}/copyright share/doc/${component})
  kvpool_debian_file(${component} ${made}/changelog.gz share/doc/${component})
endforeach()

# ---- The packages
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_COMPONENTS_ALL ${components})
foreach(component ${components})
  list(APPEND CPACK_COMPONENTS_ALL ${component}-debian)
endforeach()
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEBIAN_PACKAGE_SOURCE kvpool)
set(CPACK_DEBIAN_KVPOOLD_PACKAGE_NAME kvpoold)
set(CPACK_DEBIAN_KVPOOLD_PACKAGE_SECTION net)
set(CPACK_DEBIAN_KVPOOLD_PACKAGE_DEPENDS "systemd-standalone-sysusers | systemd-sysusers")
# Authorities are for tiers that are reached by TLS.
set(CPACK_DEBIAN_KVPOOLD_PACKAGE_RECOMMENDS "ca-certificates, kvpool-tools")
set(CPACK_DEBIAN_KVPOOLD_PACKAGE_CONTROL_EXTRA ${debian}/postinst ${debian}/prerm ${debian}/postrm ${made}/conffiles)
file(WRITE ${made}/conffiles "/etc/kvpool/access.conf\n/etc/kvpool/kvpoold.conf\n")
set(CPACK_DEBIAN_KVPOOL-TOOLS_PACKAGE_NAME kvpool-tools)
set(CPACK_DEBIAN_KVPOOL-TOOLS_PACKAGE_SECTION admin)
set(CPACK_DEBIAN_LIBKVPOOL0_PACKAGE_NAME libkvpool0)
set(CPACK_DEBIAN_LIBKVPOOL0_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_LIBKVPOOL0_PACKAGE_CONTROL_EXTRA ${made}/triggers)
file(WRITE ${made}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_LIBKVPOOL-DEV_PACKAGE_NAME libkvpool-dev)
set(CPACK_DEBIAN_LIBKVPOOL-DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_LIBKVPOOL-DEV_PACKAGE_DEPENDS
  "libkvpool0 (= ${PROJECT_VERSION}), libprotobuf-dev, libabsl-dev, libssl-dev")
set(CPACK_COMPONENT_KVPOOLD_DESCRIPTION "owner of the KV-cache memory that LLM engines lease
kvpoold owns paged KV-cache memory of GPUs, or of the host, and leases it in
blocks to inference engines, which share prefixes and survive each other.")
set(CPACK_COMPONENT_KVPOOL-TOOLS_DESCRIPTION "tools for kvpoold: ask, steer, load, simulate
kvpoolctl asks and steers a running kvpoold; kvpool-replay puts load on one;
kvpool-sim and kvpool-lab compare policies without one.")
set(CPACK_COMPONENT_LIBKVPOOL0_DESCRIPTION "KV-cache blocks of a kvpoold: the C ABI
With this library LLM engines lease KV-cache blocks that kvpoold owns, and
share full ones under prefix keys.")
set(CPACK_COMPONENT_LIBKVPOOL-DEV_DESCRIPTION "KV-cache blocks of a kvpoold: headers and the C++ client
Headers, the C++ client as archives, the .proto files, and what find_package
and pkg-config read.")
include(CPack)
foreach(component ${components})
  cpack_add_component_group(${component})
  cpack_add_component(${component} GROUP ${component})
  cpack_add_component(${component}-debian GROUP ${component})
endforeach()
