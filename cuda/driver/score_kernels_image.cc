#include "cuda/driver/kernels_image.h"

// The same as kernels_image.cc. It is a file of its own, so that a binary that does not score need not carry
// the image.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global kvpool_score_kernels_image\n"
    ".hidden kvpool_score_kernels_image\n"
    "kvpool_score_kernels_image:\n"
    ".incbin \"" KVPOOL_SCORE_KERNELS_FATBIN
    "\"\n"
    ".popsection\n");
