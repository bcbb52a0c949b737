// The compiled kernels (cuda/kernels/stamp_kernels.cu, cuda/kernels/score_kernels.cu), embedded in the
// binary: machine code for the architectures that cuda/toolkit.cmake names, and PTX for later ones.
#ifndef KVPOOL_CUDA_DRIVER_KERNELS_IMAGE_H_
#define KVPOOL_CUDA_DRIVER_KERNELS_IMAGE_H_

extern "C" const unsigned char kvpool_kernels_image[];
extern "C" const unsigned char kvpool_score_kernels_image[];

#endif  // KVPOOL_CUDA_DRIVER_KERNELS_IMAGE_H_
