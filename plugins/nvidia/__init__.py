"""The ``trtcb`` operators on NVIDIA GPUs: Triton kernels, one source for the ``cuda`` and the TensorRT targets."""
