package ai.onnxruntime;

import java.nio.ByteBuffer;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;

/** Signatures of ONNX Runtime's Java API. */
public abstract class OnnxTensor extends OnnxTensorLike {
  public static OnnxTensor createTensor(OrtEnvironment env, FloatBuffer data, long[] shape) throws OrtException {
    throw new UnsupportedOperationException();
  }

  public static OnnxTensor createTensor(OrtEnvironment env, DoubleBuffer data, long[] shape) throws OrtException {
    throw new UnsupportedOperationException();
  }

  public static OnnxTensor createTensor(OrtEnvironment env, LongBuffer data, long[] shape) throws OrtException {
    throw new UnsupportedOperationException();
  }

  public abstract ByteBuffer getByteBuffer();

  public abstract FloatBuffer getFloatBuffer();
}
