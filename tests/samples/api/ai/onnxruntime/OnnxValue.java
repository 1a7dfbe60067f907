package ai.onnxruntime;

/** Signature of ONNX Runtime's Java API. */
public interface OnnxValue extends AutoCloseable {
  @Override
  void close();
}
