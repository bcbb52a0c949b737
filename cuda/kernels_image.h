// The compiled kernels (cuda/kernels.cu), embedded: machine code for every architecture we name, and PTX for
// later ones.
#ifndef KVPOOL_CUDA_KERNELS_IMAGE_H_
#define KVPOOL_CUDA_KERNELS_IMAGE_H_

extern "C" const unsigned char kvpool_kernels_image[];

#endif  // KVPOOL_CUDA_KERNELS_IMAGE_H_
