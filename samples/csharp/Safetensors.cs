using System.Buffers.Binary;
using System.Text.Json;

namespace Samples;

/// <summary>A tensor: element type as in the file ("F32", "I64"), sizes, little-endian bytes.</summary>
public sealed record StateTensor(string Type, long[] Shape, byte[] Data);

/// <summary>Reads and writes the safetensors format.</summary>
public static class Safetensors
{
    public static Dictionary<string, StateTensor> Read(string path)
    {
        byte[] file = File.ReadAllBytes(path);
        ulong length = file.Length < 8 ? ulong.MaxValue : BinaryPrimitives.ReadUInt64LittleEndian(file);
        if (length > (ulong)Math.Max(0, file.Length - 8))
        {
            throw new InvalidDataException($"{path} is not a safetensors file.");
        }
        int start = 8 + (int)length;
        using JsonDocument header = JsonDocument.Parse(file.AsMemory(8, (int)length));
        var tensors = new Dictionary<string, StateTensor>();
        foreach (JsonProperty entry in header.RootElement.EnumerateObject().Where(entry => entry.Name != "__metadata__"))
        {
            long[] shape = entry.Value.GetProperty("shape").EnumerateArray().Select(size => size.GetInt64()).ToArray();
            int[] range = entry.Value.GetProperty("data_offsets").EnumerateArray().Select(at => at.GetInt32()).ToArray();
            byte[] data = file.AsSpan(start + range[0], range[1] - range[0]).ToArray();
            tensors.Add(entry.Name, new StateTensor(entry.Value.GetProperty("dtype").GetString()!, shape, data));
        }
        return tensors;
    }

    public static void Write(string path, IReadOnlyDictionary<string, StateTensor> tensors)
    {
        var order = tensors.OrderByDescending(entry => entry.Value.Type.EndsWith("64")).ThenBy(entry => entry.Key).ToList();
        var header = new Dictionary<string, object>();
        long end = 0;
        foreach ((string name, StateTensor tensor) in order)
        {
            header[name] = new { dtype = tensor.Type, shape = tensor.Shape, data_offsets = new[] { end, end + tensor.Data.Length } };
            end += tensor.Data.Length;
        }
        byte[] text = JsonSerializer.SerializeToUtf8Bytes(header);
        byte[] padding = Enumerable.Repeat((byte)' ', (8 - text.Length % 8) % 8).ToArray();
        var length = new byte[8];
        BinaryPrimitives.WriteUInt64LittleEndian(length, (ulong)(text.Length + padding.Length));
        using FileStream file = File.Create(path);
        file.Write(length);
        file.Write(text);
        file.Write(padding);
        order.ForEach(entry => file.Write(entry.Value.Data));
    }
}
