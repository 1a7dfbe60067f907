using Microsoft.ML.OnnxRuntime;
using Samples;

// Trains a classifier of four numbers on made-up points: the model of onnxtrain.examples.mlp((4, 16, 3)).
if (args.Length != 4)
{
    Console.Error.WriteLine("usage: Train step.onnx states.safetensors STEPS trained.safetensors");
    return 2;
}
const int count = 64;
var random = new Random(0);
float[] points = Enumerable.Range(0, 4 * count).Select(_ => random.NextSingle() * 2 - 1).ToArray();
long[] labels = Enumerable.Range(0, count).Select(row => (long)Enumerable.Range(0, 3).MaxBy(c => points[4 * row + c])).ToArray();

using var graph = new StepGraph(args[0], args[1]);
using OrtValue input = OrtValue.CreateTensorValueFromMemory(points, new long[] { count, 4 });
using OrtValue target = OrtValue.CreateTensorValueFromMemory(labels, new long[] { count });
using OrtValue rate = OrtValue.CreateTensorValueFromMemory(new[] { 0.01f }, Array.Empty<long>());
var batch = new Dictionary<string, OrtValue> { ["input"] = input, ["target"] = target, ["learning_rate"] = rate };
for (int step = 0; step < int.Parse(args[2]); step++)
{
    Console.WriteLine(graph.Step(batch));
}
graph.Save(args[3]);
return 0;
