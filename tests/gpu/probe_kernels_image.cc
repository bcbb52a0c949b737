// The assembler takes the file in as it is; KVPOOL_PROBE_FATBIN is its path.
asm(".pushsection .rodata\n"
    ".balign 64\n"
    ".global kvpool_probe_kernels_image\n"
    ".hidden kvpool_probe_kernels_image\n"
    "kvpool_probe_kernels_image:\n"
    ".incbin \"" KVPOOL_PROBE_FATBIN
    "\"\n"
    ".popsection\n");
