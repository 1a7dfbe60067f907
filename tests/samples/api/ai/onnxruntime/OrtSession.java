package ai.onnxruntime;

import java.util.Map;
import java.util.Optional;
import java.util.Set;

/** Signatures of ONNX Runtime's Java API. */
public abstract class OrtSession implements AutoCloseable {
  public abstract Set<String> getInputNames();

  public abstract OnnxModelMetadata getMetadata() throws OrtException;

  public abstract Result run(Map<String, ? extends OnnxTensorLike> inputs, Set<String> outputs) throws OrtException;

  @Override
  public abstract void close() throws OrtException;

  /** Options. */
  public static class SessionOptions implements AutoCloseable {
    public void addConfigEntry(String key, String value) throws OrtException {}

    @Override
    public void close() {}
  }

  /** Outputs by name. */
  public abstract static class Result implements AutoCloseable {
    public abstract Optional<OnnxValue> get(String name);

    @Override
    public abstract void close();
  }
}
