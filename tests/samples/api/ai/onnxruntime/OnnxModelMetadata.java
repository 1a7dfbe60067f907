package ai.onnxruntime;

import java.util.Map;

/** Signature of ONNX Runtime's Java API. */
public abstract class OnnxModelMetadata {
  public abstract Map<String, String> getCustomMetadata();
}
