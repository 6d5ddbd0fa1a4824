/* What the TensorRT Python bindings are linked against: enough to import them and to check plugins where TensorRT is not. */
void *createInferBuilder_INTERNAL(void) { return 0; }
void *createInferRefitter_INTERNAL(void) { return 0; }
void *createInferRuntime_INTERNAL(void) { return 0; }
void *createNvOnnxParserRefitter_INTERNAL(void) { return 0; }
void *createNvOnnxParser_INTERNAL(void) { return 0; }
void *getBuilderPluginRegistry(void) { return 0; }
void *getPluginRegistry(void) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void) { return 1; }
