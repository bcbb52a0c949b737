# What `cmake --install` puts where. A component is a Debian package: deploy/README.md says what each has.
if(CMAKE_LIBRARY_ARCHITECTURE)  # Debian's place, for every prefix: the linker, pkg-config and find_package look there.
  set(CMAKE_INSTALL_LIBDIR lib/${CMAKE_LIBRARY_ARCHITECTURE} CACHE PATH "Libraries, below the prefix")
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvpool)
# Headers keep the paths that they have in the tree, in a folder of their own: that leaves the names client and proto free
# for others in <prefix>/include. The C header includes none of them, and needs no search path.
set(include_dir ${CMAKE_INSTALL_INCLUDEDIR}/kvpool)

install(TARGETS kvpoold RUNTIME COMPONENT kvpoold)
install(TARGETS kvpoolctl kvpool-replay kvpool-sim kvpool-lab RUNTIME COMPONENT kvpool-tools)

# In the wheel programs lie in the package, where kvpool/programs.py finds them.
if(TARGET kvpool_python)
  add_custom_target(kvpool_wheel DEPENDS kvpool_python kvpool_python_stub kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab)
endif()
install(TARGETS kvpoold kvpoolctl kvpool-replay kvpool-sim kvpool-lab RUNTIME DESTINATION kvpool/bin COMPONENT python EXCLUDE_FROM_ALL)

# ---- The C ABI. An export of its own, since whoever links it needs nothing: not even Protocol Buffers.
install(TARGETS kvpool_c EXPORT kvpool-c
        LIBRARY COMPONENT libkvpool0 NAMELINK_COMPONENT libkvpool-dev)
install(FILES ${PROJECT_SOURCE_DIR}/client/c/kvpool.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT libkvpool-dev)
install(EXPORT kvpool-c NAMESPACE kvpool:: DESTINATION ${package_dir} COMPONENT libkvpool-dev)

# ---- The C++ client: archives, whose users bring the same Protocol Buffers. The services' stubs are not among them.
install(TARGETS kvpool_client kvpool_proto kvpool_support kvpool_attach_socket kvpool_step_frames kvpool_connect_error kvpool_cuda_member
        EXPORT kvpool-client ARCHIVE COMPONENT libkvpool-dev)
install(EXPORT kvpool-client NAMESPACE kvpool:: DESTINATION ${package_dir} COMPONENT libkvpool-dev)
file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/client/*.h)
install(FILES ${headers} DESTINATION ${include_dir}/client COMPONENT libkvpool-dev)
install(FILES ${PROJECT_SOURCE_DIR}/proto/support/block_ref.h ${PROJECT_SOURCE_DIR}/proto/support/limits.h
              ${PROJECT_SOURCE_DIR}/proto/support/low_layout.h
        DESTINATION ${include_dir}/proto/support COMPONENT libkvpool-dev)
install(DIRECTORY ${PROJECT_BINARY_DIR}/proto/kvpool DESTINATION ${include_dir} COMPONENT libkvpool-dev
        FILES_MATCHING PATTERN "*.h" PATTERN "*.grpc.pb.h" EXCLUDE)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/kvpool DESTINATION ${CMAKE_INSTALL_DATADIR}/kvpool/proto COMPONENT libkvpool-dev
        FILES_MATCHING PATTERN "*.proto")

# ---- find_package and pkg-config
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/kvpoolConfig.cmake.in ${PROJECT_BINARY_DIR}/kvpoolConfig.cmake
                              INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_DATADIR NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may change anything.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kvpoolConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kvpoolConfig.cmake ${PROJECT_BINARY_DIR}/kvpoolConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT libkvpool-dev)
# The files find their prefix from where they lie.
file(RELATIVE_PATH pc_to_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
foreach(name kvpool kvpool-client)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/${name}.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT libkvpool-dev)
endforeach()
if(NOT KVPOOL_PYTHON_PACKAGE)
  include(cmake/debian.cmake)
endif()
