package ai.onnxruntime;

/** Signature of ONNX Runtime's Java API. */
public class OrtException extends Exception {}
