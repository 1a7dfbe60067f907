package ai.onnxruntime;

/** Signatures of ONNX Runtime's Java API. */
public abstract class OrtEnvironment implements AutoCloseable {
  public static OrtEnvironment getEnvironment() {
    throw new UnsupportedOperationException();
  }

  public abstract OrtSession createSession(String path, OrtSession.SessionOptions options) throws OrtException;

  public abstract OrtSession createSession(byte[] model, OrtSession.SessionOptions options) throws OrtException;
}
