"""The ``trtcb`` operators: their schemas, their reference meaning, and their kernels for each target."""
