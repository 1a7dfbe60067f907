package samples;

import ai.onnxruntime.OnnxTensor;
import java.nio.file.Path;
import java.util.Map;
import java.util.Random;

/** Trains a classifier of four numbers on made-up points: the model of {@code onnxtrain.examples.mlp((4, 16, 3))}. */
public final class Main {
  private Main() {}

  public static void main(String[] arguments) throws Exception {
    if (arguments.length != 4) {
      System.err.println("usage: Main step.onnx states.safetensors STEPS trained.safetensors");
      System.exit(2);
    }
    int count = 64;
    float[] points = new float[4 * count];
    long[] labels = new long[count];
    Random random = new Random(0);
    for (int row = 0; row < count; row++) {
      for (int column = 0; column < 4; column++) {
        points[4 * row + column] = (float) random.nextGaussian();
        if (column < 3 && points[4 * row + column] > points[(int) (4 * row + labels[row])]) {
          labels[row] = column;
        }
      }
    }
    try (StepGraph graph = new StepGraph(Path.of(arguments[0]), Path.of(arguments[1]));
        OnnxTensor input = graph.floats(points, count, 4);
        OnnxTensor target = graph.integers(labels, count);
        OnnxTensor rate = graph.floats(new float[] {0.01f})) {
      for (int step = 0; step < Integer.parseInt(arguments[2]); step++) {
        System.out.println(graph.step(Map.of("input", input, "target", target, "learning_rate", rate)));
      }
      graph.save(Path.of(arguments[3]));
    }
  }
}
