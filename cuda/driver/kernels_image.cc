#include "cuda/driver/kernels_image.h"

// The assembler includes the file as it is; KVPOOL_KERNELS_FATBIN is its path. A fat binary is read in
// 8-byte words.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global kvpool_kernels_image\n"
    ".hidden kvpool_kernels_image\n"
    "kvpool_kernels_image:\n"
    ".incbin \"" KVPOOL_KERNELS_FATBIN
    "\"\n"
    ".popsection\n");
