package ai.onnxruntime;

/** Signature of ONNX Runtime's Java API. */
public abstract class OnnxTensorLike implements OnnxValue {
  public abstract TensorInfo getInfo();
}
