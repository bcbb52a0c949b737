// The assembler takes the file in as it is; KVPOOL_FAULTY_FATBIN is its path.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global kvpool_faulty_kernels_image\n"
    ".hidden kvpool_faulty_kernels_image\n"
    "kvpool_faulty_kernels_image:\n"
    ".incbin \"" KVPOOL_FAULTY_FATBIN
    "\"\n"
    ".popsection\n");
