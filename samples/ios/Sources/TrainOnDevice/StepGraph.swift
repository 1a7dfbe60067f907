import Foundation
import OnnxRuntimeBindings

/// What is wrong with a file, in one sentence.
public struct SampleError: LocalizedError {
    public let errorDescription: String?
}

/// A training step of an ONNX model, and the states between the steps. One thread at a time may use it.
///
/// The Objective-C API does not read a model's metadata: the states are the inputs `X` that have an output `X_new`, as
/// `onnxtrain export` names them.
public final class StepGraph {
    private let environment: ORTEnv
    private let session: ORTSession
    private var states: [String: ORTValue] = [:]
    private let outputs: Set<String>

    public init(graph: URL, states file: URL) throws {
        environment = try ORTEnv(loggingLevel: .warning)
        let options = try ORTSessionOptions()
        // ONNX Runtime's Dropout elimination may remove a mask that the backward pass reads.
        try options.addConfigEntry(
            withKey: "optimization.disable_specified_optimizers", value: "EliminateDropout")
        session = try ORTSession(env: environment, modelPath: graph.path, sessionOptions: options)
        let inputs = Set(try session.inputNames())
        outputs = Set(try session.outputNames())
        for (name, tensor) in try Safetensors.read(Data(contentsOf: file)) where inputs.contains(name) {
            states[name] = try tensor.value()
        }
        for output in outputs where output.hasSuffix("_new") {
            let name = String(output.dropLast("_new".count))
            if inputs.contains(name) && states[name] == nil {
                throw SampleError(errorDescription: "The states have no \(name), which the graph reads.")
            }
        }
    }

    /// Runs one step on a batch with its target and learning rate; returns the loss before the update.
    public func step(_ batch: [String: ORTValue]) throws -> Float {
        let feeds = batch.merging(states) { _, state in state }
        let results = try session.run(withInputs: feeds, outputNames: outputs, runOptions: nil)
        for name in states.keys {
            if let new = results[name + "_new"] {
                states[name] = new
            }
        }
        guard let loss = results["loss"] else {
            throw SampleError(errorDescription: "The graph has no output named loss.")
        }
        return try loss.tensorData().bytes.load(as: Float.self)
    }

    /// All states as a safetensors file, for `onnxtrain import-states`.
    public func save() throws -> Data {
        try Safetensors.write(states.mapValues { try StateTensor($0) })
    }
}

/// A tensor of floats, such as a batch.
public func floats(_ values: [Float], shape: [Int]) throws -> ORTValue {
    let data = values.withUnsafeBufferPointer { NSMutableData(data: Data(buffer: $0)) }
    return try ORTValue(tensorData: data, elementType: .float, shape: shape as [NSNumber])
}

/// A tensor of integers, such as labels.
public func integers(_ values: [Int64], shape: [Int]) throws -> ORTValue {
    let data = values.withUnsafeBufferPointer { NSMutableData(data: Data(buffer: $0)) }
    return try ORTValue(tensorData: data, elementType: .int64, shape: shape as [NSNumber])
}
