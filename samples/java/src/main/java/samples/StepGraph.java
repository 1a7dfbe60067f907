package samples;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** A training step of an ONNX model, and the states between the steps. One thread at a time may use it. */
public final class StepGraph implements AutoCloseable {
  private static final Pattern PAIR = Pattern.compile("\"([^\"]+)\"\\s*:\\s*\"([^\"]+)\"");

  private final OrtEnvironment environment = OrtEnvironment.getEnvironment();
  private final OrtSession session;
  /** The output with the new value of each state. */
  private final Map<String, String> news = new LinkedHashMap<>();
  /** Values before the first step. */
  private final Map<String, OnnxTensor> first = new HashMap<>();
  /** Results of the last step, which own the current values; null before the first. */
  private OrtSession.Result last;

  public StepGraph(Path graph, Path states) throws OrtException, IOException {
    OrtSession.SessionOptions options = new OrtSession.SessionOptions();
    // ONNX Runtime's Dropout elimination may remove a mask that the backward pass reads.
    options.addConfigEntry("optimization.disable_specified_optimizers", "EliminateDropout");
    session = environment.createSession(graph.toString(), options);
    String names = session.getMetadata().getCustomMetadata().get("onnxtrain.states");
    if (names == null) {
      throw new IllegalArgumentException(graph + " is no step graph: its metadata has no onnxtrain.states.");
    }
    for (Matcher pair = PAIR.matcher(names); pair.find(); ) {
      news.put(pair.group(1), pair.group(2));
    }
    Map<String, Safetensors.Tensor> values = Safetensors.read(states);
    Set<String> inputs = session.getInputNames();
    for (Map.Entry<String, Safetensors.Tensor> entry : values.entrySet()) {
      if (inputs.contains(entry.getKey())) {
        first.put(entry.getKey(), tensor(entry.getValue()));
      }
    }
    for (String name : news.keySet()) {
      if (inputs.contains(name) && !first.containsKey(name)) {
        throw new IllegalArgumentException(states + " has no " + name + ", which the graph reads.");
      }
    }
  }

  /** Runs one step on a batch with its target and learning rate, and returns the loss before the update. */
  public float step(Map<String, OnnxTensor> batch) throws OrtException {
    Map<String, OnnxTensor> feeds = new HashMap<>(batch);
    for (String name : first.keySet()) {
      feeds.put(name, state(name));
    }
    Set<String> wanted = new HashSet<>(news.values());
    wanted.add("loss");
    OrtSession.Result result = session.run(feeds, wanted);
    if (last != null) {
      last.close();
    }
    last = result;
    return ((OnnxTensor) result.get("loss").orElseThrow()).getFloatBuffer().get(0);
  }

  /** The current value of a state; valid until the next step. */
  public OnnxTensor state(String name) {
    String output = news.get(name);
    return last == null || output == null ? first.get(name) : (OnnxTensor) last.get(output).orElseThrow();
  }

  /** Writes all states, for {@code onnxtrain import-states}. */
  public void save(Path path) throws OrtException, IOException {
    Map<String, Safetensors.Tensor> tensors = new TreeMap<>();
    for (String name : first.keySet()) {
      OnnxTensor value = state(name);
      ByteBuffer data = value.getByteBuffer().order(ByteOrder.LITTLE_ENDIAN);
      String type =
          switch (value.getInfo().type) {
            case FLOAT -> "F32";
            case DOUBLE -> "F64";
            case INT64 -> "I64";
            default -> throw new IllegalStateException("The state " + name + " has the type " + value.getInfo().type + ".");
          };
      tensors.put(name, new Safetensors.Tensor(type, value.getInfo().getShape(), data));
    }
    Safetensors.write(path, tensors);
  }

  public OnnxTensor floats(float[] values, long... shape) throws OrtException {
    return OnnxTensor.createTensor(environment, FloatBuffer.wrap(values), shape);
  }

  public OnnxTensor integers(long[] values, long... shape) throws OrtException {
    return OnnxTensor.createTensor(environment, LongBuffer.wrap(values), shape);
  }

  private OnnxTensor tensor(Safetensors.Tensor tensor) throws OrtException {
    return switch (tensor.type()) {
      case "F32" -> OnnxTensor.createTensor(environment, tensor.data().asFloatBuffer(), tensor.shape());
      case "F64" -> OnnxTensor.createTensor(environment, tensor.data().asDoubleBuffer(), tensor.shape());
      case "I64" -> OnnxTensor.createTensor(environment, tensor.data().asLongBuffer(), tensor.shape());
      default -> throw new IllegalArgumentException("States of the type " + tensor.type() + " are not read here.");
    };
  }

  @Override
  public void close() throws OrtException {
    if (last != null) {
      last.close();
    }
    first.values().forEach(OnnxTensor::close);
    session.close();
  }
}
