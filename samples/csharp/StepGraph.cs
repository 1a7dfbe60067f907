using System.Runtime.InteropServices;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace Samples;

/// <summary>A training step of an ONNX model, and the states between the steps. One thread at a time may use it.</summary>
public sealed class StepGraph : IDisposable
{
    private readonly InferenceSession session;
    private readonly Dictionary<string, string> news;
    private readonly Dictionary<string, OrtValue> states = new();

    public StepGraph(string graph, string statesPath)
    {
        using var options = new SessionOptions();
        // ONNX Runtime's Dropout elimination may remove a mask that the backward pass reads.
        options.AddSessionConfigEntry("optimization.disable_specified_optimizers", "EliminateDropout");
        session = new InferenceSession(graph, options);
        if (!session.ModelMetadata.CustomMetadataMap.TryGetValue("onnxtrain.states", out string? names))
        {
            throw new ArgumentException($"{graph} is no step graph: its metadata has no onnxtrain.states.");
        }
        news = JsonSerializer.Deserialize<Dictionary<string, string>>(names)!;
        foreach ((string name, StateTensor tensor) in Safetensors.Read(statesPath))
        {
            if (session.InputMetadata.ContainsKey(name))
            {
                states.Add(name, ValueOf(tensor));
            }
        }
        foreach (string name in news.Keys.Where(name => session.InputMetadata.ContainsKey(name) && !states.ContainsKey(name)))
        {
            throw new ArgumentException($"{statesPath} has no {name}, which the graph reads.");
        }
    }

    /// <summary>Runs one step on a batch with its target and learning rate; returns the loss before the update.</summary>
    public float Step(IReadOnlyDictionary<string, OrtValue> batch)
    {
        var feeds = new Dictionary<string, OrtValue>(batch);
        foreach ((string name, OrtValue value) in states)
        {
            feeds[name] = value;
        }
        List<string> outputs = news.Values.Append("loss").ToList();
        using var options = new RunOptions();
        IDisposableReadOnlyCollection<OrtValue> results = session.Run(options, feeds, outputs);
        foreach (((string name, _), OrtValue value) in news.Zip(results))
        {
            if (states.Remove(name, out OrtValue? old))
            {
                old.Dispose();
                states.Add(name, value);
            }
        }
        using OrtValue loss = results[outputs.Count - 1];
        return loss.GetTensorDataAsSpan<float>()[0];
    }

    /// <summary>Writes all states, for <c>onnxtrain import-states</c>.</summary>
    public void Save(string path)
    {
        Safetensors.Write(path, states.ToDictionary(entry => entry.Key, entry => TensorOf(entry.Key, entry.Value)));
    }

    private static OrtValue ValueOf(StateTensor tensor) => tensor.Type switch
    {
        "F32" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, float>(tensor.Data).ToArray(), tensor.Shape),
        "F64" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, double>(tensor.Data).ToArray(), tensor.Shape),
        "I64" => OrtValue.CreateTensorValueFromMemory(MemoryMarshal.Cast<byte, long>(tensor.Data).ToArray(), tensor.Shape),
        _ => throw new NotSupportedException($"States of the type {tensor.Type} are not read here."),
    };

    private static StateTensor TensorOf(string name, OrtValue value)
    {
        OrtTensorTypeAndShapeInfo info = value.GetTensorTypeAndShape();
        return info.ElementDataType switch
        {
            TensorElementType.Float => new("F32", info.Shape, MemoryMarshal.AsBytes(value.GetTensorDataAsSpan<float>()).ToArray()),
            TensorElementType.Double => new("F64", info.Shape, MemoryMarshal.AsBytes(value.GetTensorDataAsSpan<double>()).ToArray()),
            TensorElementType.Int64 => new("I64", info.Shape, MemoryMarshal.AsBytes(value.GetTensorDataAsSpan<long>()).ToArray()),
            _ => throw new NotSupportedException($"The state {name} has the type {info.ElementDataType}."),
        };
    }

    public void Dispose()
    {
        foreach (OrtValue value in states.Values)
        {
            value.Dispose();
        }
        session.Dispose();
    }
}
