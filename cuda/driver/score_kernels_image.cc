#include "cuda/driver/kernels_image.h"

// As kernels_image.cc, in a file of its own: what does not score need not carry it.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global kvpool_score_kernels_image\n"
    ".hidden kvpool_score_kernels_image\n"
    "kvpool_score_kernels_image:\n"
    ".incbin \"" KVPOOL_SCORE_KERNELS_FATBIN
    "\"\n"
    ".popsection\n");
