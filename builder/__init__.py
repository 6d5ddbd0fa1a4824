"""From a checkpoint to a plan: model sources, the ONNX exporter, and one compiler per target."""
