# The CUDA toolkit: KVPOOL_CUDA_ROOT (a folder with bin/nvcc; "none" builds without CUDA), else nvcc in PATH, else
# /usr/local/cuda. Sets KVPOOL_NVCC and KVPOOL_CUDA_INCLUDE, both empty where there is none. CMake's own CUDA language is
# not used: CMake 3.25 does not know CUDA20, and the kernels need a single command of nvcc.
set(KVPOOL_CUDA_ROOT "" CACHE STRING "CUDA toolkit to use before any other, or none")
set(KVPOOL_NVCC "")
set(KVPOOL_CUDA_INCLUDE "")
if(KVPOOL_CUDA_ROOT STREQUAL "none")
  message(STATUS "CUDA: building without it, as asked")
else()
  if(KVPOOL_CUDA_ROOT)
    find_program(KVPOOL_NVCC_PROGRAM nvcc PATHS ${KVPOOL_CUDA_ROOT}/bin NO_CACHE NO_DEFAULT_PATH)
    if(NOT KVPOOL_NVCC_PROGRAM)
      message(FATAL_ERROR "KVPOOL_CUDA_ROOT: there is no bin/nvcc in ${KVPOOL_CUDA_ROOT}")
    endif()
  else()
    find_program(KVPOOL_NVCC_PROGRAM nvcc PATHS /usr/local/cuda/bin NO_CACHE)
  endif()
  if(KVPOOL_NVCC_PROGRAM)
    set(KVPOOL_NVCC ${KVPOOL_NVCC_PROGRAM})
    # nvcc may be a link or a script in another folder, so its dry run says where its toolkit is.
    execute_process(COMMAND ${KVPOOL_NVCC} --dryrun -x cu -c /dev/null ERROR_VARIABLE dryrun OUTPUT_QUIET
                    COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCH "_HERE_=([^\n]+)" line "${dryrun}")
    set(nvcc_folder ${CMAKE_MATCH_1})
    find_path(KVPOOL_CUDA_HEADERS cuda.h
              PATHS ${nvcc_folder}/../include ${nvcc_folder}/../targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include
              NO_CACHE NO_DEFAULT_PATH REQUIRED)
    set(KVPOOL_CUDA_INCLUDE ${KVPOOL_CUDA_HEADERS})
    # Compression (12.8 and later) makes the kernels a quarter of the size; every binary that opens a GPU carries them.
    execute_process(COMMAND ${KVPOOL_NVCC} --help OUTPUT_VARIABLE help ERROR_QUIET)
    string(FIND "${help}" "--compress-mode" found)
    if(NOT found EQUAL -1)
      set(KVPOOL_NVCC_COMPRESSION --compress-mode=size CACHE INTERNAL "Of the kernels")
    endif()
    # A sanitizer's tests over the fake driver run the host's bodies in place of the kernels, and need only their names: without
    # optimisations, which later toolkits can leave out, that takes a tenth of the time.
    string(FIND "${help}" "--Ofast-compile" found)
    set(KVPOOL_NVCC_QUICK "" CACHE INTERNAL "Of the kernels")
    if(KVPOOL_SANITIZE AND NOT found EQUAL -1)
      set(KVPOOL_NVCC_QUICK --Ofast-compile max CACHE INTERNAL "Of the kernels")
    endif()
    message(STATUS "CUDA: ${KVPOOL_NVCC}, headers in ${KVPOOL_CUDA_INCLUDE}")
  else()
    message(STATUS "CUDA: no nvcc found; building without CUDA")
  endif()
endif()

# A kernel that spills registers or keeps arrays in local memory does not build.
set(KVPOOL_PTXAS_GATE -Xptxas -warn-spills,-warn-lmem-usage,-Werror CACHE INTERNAL "")

# tests/mutants/kernel_defects.py builds many fat binaries of which it executes the PTX alone.
option(KVPOOL_PTX_ONLY "Leave the machine code out of the kernels: for tests without a GPU" OFF)

# kvpool_fatbin(<output> <source.cu> [<more options>…]): machine code for the architectures below, and PTX for later ones.
# A kernel that spills registers or uses local memory does not build.
function(kvpool_fatbin output source)
  set(architectures)
  if(NOT KVPOOL_PTX_ONLY)
    foreach(sm 75 80 86 89 90 100 120)
      list(APPEND architectures -gencode arch=compute_${sm},code=sm_${sm})
    endforeach()
  endif()
  # The PTX is for 100 and not for 120, so that 110 can compile it too.
  list(APPEND architectures -gencode arch=compute_100,code=compute_100)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${KVPOOL_NVCC} -fatbin -std=c++20 -O3 ${KVPOOL_NVCC_QUICK} ${KVPOOL_NVCC_COMPRESSION} -I ${PROJECT_SOURCE_DIR} ${ARGN}
            ${architectures}
            ${KVPOOL_PTXAS_GATE} -MD -MF ${output}.d -o ${output} ${source}
    DEPENDS ${source}
    DEPFILE ${output}.d
    COMMENT "Compiling ${source} for every GPU architecture"
    VERBATIM)
endfunction()
