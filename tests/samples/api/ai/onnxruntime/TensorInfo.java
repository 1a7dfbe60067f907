package ai.onnxruntime;

/** Signature of ONNX Runtime's Java API. */
public class TensorInfo {
  public final OnnxJavaType type = OnnxJavaType.FLOAT;

  public long[] getShape() {
    throw new UnsupportedOperationException();
  }
}
