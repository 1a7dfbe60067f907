package samples;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Tensors in the safetensors format, for names without quotes and backslashes. */
public final class Safetensors {
  /** A tensor: element type as in the file ("F32", "I64"), sizes, and the bytes in little-endian order. */
  public record Tensor(String type, long[] shape, ByteBuffer data) {}

  private static final Pattern ENTRY =
      Pattern.compile(
          "\"([^\"]+)\"\\s*:\\s*\\{\"dtype\"\\s*:\\s*\"(\\w+)\"\\s*,\\s*\"shape\"\\s*:\\s*\\[([^\\]]*)\\]\\s*,"
              + "\\s*\"data_offsets\"\\s*:\\s*\\[\\s*(\\d+)\\s*,\\s*(\\d+)\\s*\\]\\s*\\}");

  private Safetensors() {}

  /** Reads all tensors of a file, by name. */
  public static Map<String, Tensor> read(Path path) throws IOException {
    ByteBuffer file = ByteBuffer.wrap(Files.readAllBytes(path)).order(ByteOrder.LITTLE_ENDIAN);
    if (file.remaining() < 8 || file.getLong(0) < 0 || file.getLong(0) > file.remaining() - 8) {
      throw new IOException(path + " is not a safetensors file.");
    }
    int length = (int) file.getLong(0);
    String header = new String(file.array(), 8, length, StandardCharsets.UTF_8);
    Map<String, Tensor> tensors = new TreeMap<>();
    Matcher entry = ENTRY.matcher(header);
    while (entry.find()) {
      int begin = 8 + length + Integer.parseInt(entry.group(4));
      int end = 8 + length + Integer.parseInt(entry.group(5));
      if (begin > end || end > file.limit()) {
        throw new IOException("The tensor " + entry.group(1) + " lies outside of " + path + ".");
      }
      ByteBuffer data = ByteBuffer.allocateDirect(end - begin).order(ByteOrder.LITTLE_ENDIAN);
      data.put(file.array(), begin, end - begin).flip();
      long[] shape =
          Arrays.stream(entry.group(3).split(",")).map(String::strip).filter(size -> !size.isEmpty())
              .mapToLong(Long::parseLong).toArray();
      tensors.put(entry.group(1), new Tensor(entry.group(2), shape, data));
    }
    return tensors;
  }

  /** Writes tensors, those of the largest elements first, as readers of aligned memory like it. */
  public static void write(Path path, Map<String, Tensor> tensors) throws IOException {
    List<String> entries = new ArrayList<>();
    List<Map.Entry<String, Tensor>> order = new ArrayList<>(new TreeMap<>(tensors).entrySet());
    order.sort((one, other) -> size(other.getValue().type()) - size(one.getValue().type()));
    long end = 0;
    for (Map.Entry<String, Tensor> entry : order) {
      Tensor tensor = entry.getValue();
      long begin = end;
      end += tensor.data().remaining();
      entries.add(
          String.format("\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%d,%d]}", entry.getKey(), tensor.type(),
              Arrays.toString(tensor.shape()).replace(" ", ""), begin, end));
    }
    StringBuilder header = new StringBuilder("{" + String.join(",", entries) + "}");
    while (header.toString().getBytes(StandardCharsets.UTF_8).length % 8 != 0) {
      header.append(' ');
    }
    byte[] text = header.toString().getBytes(StandardCharsets.UTF_8);
    ByteBuffer file = ByteBuffer.allocate((int) (8 + text.length + end)).order(ByteOrder.LITTLE_ENDIAN);
    file.putLong(text.length).put(text);
    order.forEach(entry -> file.put(entry.getValue().data().duplicate()));
    Files.write(path, file.array());
  }

  private static int size(String type) {
    return switch (type) {
      case "F64", "I64", "U64" -> 8;
      case "F32", "I32", "U32" -> 4;
      case "F16", "BF16", "I16", "U16" -> 2;
      default -> 1;
    };
  }

  /** Copies a file through both directions: {@code java samples.Safetensors in.safetensors out.safetensors}. */
  public static void main(String[] paths) throws IOException {
    write(Path.of(paths[1]), read(Path.of(paths[0])));
  }
}
