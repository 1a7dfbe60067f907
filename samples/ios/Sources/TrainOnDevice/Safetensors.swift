import Foundation
import OnnxRuntimeBindings

/// A tensor of a safetensors file: element type as there ("F32", "I64"), sizes, little-endian bytes.
struct StateTensor {
    let type: String
    let shape: [Int]
    let data: Data

    init(type: String, shape: [Int], data: Data) {
        (self.type, self.shape, self.data) = (type, shape, data)
    }

    init(_ value: ORTValue) throws {
        let info = try value.tensorTypeAndShapeInfo()
        switch info.elementType {
        case .float: type = "F32"
        case .int64: type = "I64"
        default: throw SampleError(errorDescription: "A state has the element type \(info.elementType.rawValue).")
        }
        shape = info.shape.map(\.intValue)
        data = try value.tensorData() as Data
    }

    func value() throws -> ORTValue {
        let kinds: [String: ORTTensorElementDataType] = ["F32": .float, "I64": .int64]
        guard let kind = kinds[type] else {
            throw SampleError(errorDescription: "States of the type \(type) are not read here.")
        }
        return try ORTValue(tensorData: NSMutableData(data: data), elementType: kind, shape: shape as [NSNumber])
    }
}

/// Reads and writes the safetensors format.
enum Safetensors {
    private struct Entry: Codable {
        let dtype: String
        let shape: [Int]
        let data_offsets: [Int]
    }

    static func read(_ file: Data) throws -> [String: StateTensor] {
        let damaged = SampleError(errorDescription: "This is not a safetensors file.")
        guard file.count >= 8 else { throw damaged }
        let length = (0..<8).reduce(UInt64(0)) { $0 | UInt64(file[file.startIndex + $1]) << (8 * UInt64($1)) }
        guard length <= UInt64(file.count - 8) else { throw damaged }
        let start = 8 + Int(length)
        let header = try JSONDecoder().decode([String: Entry].self, from: file.subdata(in: 8..<start))
        return try header.mapValues { entry in
            let (begin, end) = (entry.data_offsets[0], entry.data_offsets[1])
            guard begin <= end, start + end <= file.count else { throw damaged }
            return StateTensor(type: entry.dtype, shape: entry.shape, data: file.subdata(in: start + begin..<start + end))
        }
    }

    static func write(_ tensors: [String: StateTensor]) throws -> Data {
        let order = tensors.sorted { ($0.value.type == "I64" ? 0 : 1, $0.key) < ($1.value.type == "I64" ? 0 : 1, $1.key) }
        var header: [String: Entry] = [:]
        var end = 0
        for (name, tensor) in order {
            header[name] = Entry(dtype: tensor.type, shape: tensor.shape, data_offsets: [end, end + tensor.data.count])
            end += tensor.data.count
        }
        var text = try JSONEncoder().encode(header)
        text.append(Data(repeating: UInt8(ascii: " "), count: (8 - text.count % 8) % 8))
        var file = Data((0..<8).map { UInt8(truncatingIfNeeded: UInt64(text.count) >> (8 * UInt64($0))) })
        file.append(text)
        order.forEach { file.append($0.value.data) }
        return file
    }
}
