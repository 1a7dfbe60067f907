package samples

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import ai.onnxruntime.OrtSession
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.FloatBuffer
import java.nio.LongBuffer

/** A tensor of a safetensors file: element type as there ("F32", "I64"), sizes, little-endian bytes. */
class StateTensor(val type: String, val shape: LongArray, val data: ByteBuffer)

/** Reads and writes the safetensors format, for names without quotes and backslashes. */
object Safetensors {
    private val entry = Regex(
        "\"([^\"]+)\"\\s*:\\s*\\{\"dtype\"\\s*:\\s*\"(\\w+)\"\\s*,\\s*\"shape\"\\s*:\\s*\\[([^\\]]*)\\]\\s*," +
            "\\s*\"data_offsets\"\\s*:\\s*\\[\\s*(\\d+)\\s*,\\s*(\\d+)\\s*\\]\\s*\\}",
    )

    fun read(bytes: ByteArray): Map<String, StateTensor> {
        val file = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)
        require(bytes.size >= 8 && file.getLong(0) in 0..(bytes.size - 8L)) { "This is not a safetensors file." }
        val start = 8 + file.getLong(0).toInt()
        val header = String(bytes, 8, start - 8, Charsets.UTF_8)
        return entry.findAll(header).associate { found ->
            val (name, type, sizes, begin, end) = found.destructured
            val length = end.toInt() - begin.toInt()
            require(length >= 0 && start + end.toInt() <= bytes.size) { "The tensor $name lies outside of the file." }
            val data = ByteBuffer.allocateDirect(length).order(ByteOrder.LITTLE_ENDIAN)
            data.put(bytes, start + begin.toInt(), length).flip()
            val shape = sizes.split(",").filter { it.isNotBlank() }.map { it.trim().toLong() }.toLongArray()
            name to StateTensor(type, shape, data)
        }
    }

    fun write(tensors: Map<String, StateTensor>): ByteArray {
        val order = tensors.toSortedMap().entries.sortedByDescending { if (it.value.type.endsWith("64")) 8 else 4 }
        var end = 0
        val entries = order.map { (name, tensor) ->
            val begin = end
            end += tensor.data.remaining()
            val shape = tensor.shape.joinToString(",")
            "\"$name\":{\"dtype\":\"${tensor.type}\",\"shape\":[$shape],\"data_offsets\":[$begin,$end]}"
        }
        val text = entries.joinToString(",", "{", "}").toByteArray()
        val header = text + ByteArray((8 - text.size % 8) % 8) { ' '.code.toByte() }
        val file = ByteBuffer.allocate(8 + header.size + end).order(ByteOrder.LITTLE_ENDIAN)
        file.putLong(header.size.toLong()).put(header)
        order.forEach { file.put(it.value.data.duplicate()) }
        return file.array()
    }
}

/** A training step of an ONNX model, and the states between the steps. One thread at a time may use it. */
class StepGraph(graph: ByteArray, states: ByteArray) : AutoCloseable {
    private val environment = OrtEnvironment.getEnvironment()
    private val session: OrtSession
    private val news: Map<String, String>
    private val first: Map<String, OnnxTensor>
    private var last: OrtSession.Result? = null

    init {
        val options = OrtSession.SessionOptions()
        // ONNX Runtime's Dropout elimination may remove a mask that the backward pass reads.
        options.addConfigEntry("optimization.disable_specified_optimizers", "EliminateDropout")
        session = environment.createSession(graph, options)
        val names = requireNotNull(session.metadata.customMetadata["onnxtrain.states"]) {
            "This is no step graph: its metadata has no onnxtrain.states."
        }
        news = Regex("\"([^\"]+)\"\\s*:\\s*\"([^\"]+)\"").findAll(names).associate { it.groupValues[1] to it.groupValues[2] }
        first = Safetensors.read(states).filterKeys { it in session.inputNames }.mapValues { tensorOf(it.value) }
        val missing = news.keys.filter { it in session.inputNames && it !in first }
        require(missing.isEmpty()) { "The states have no ${missing.first()}, which the graph reads." }
    }

    /** Runs one step on a batch with its target and learning rate; returns the loss before the update. */
    fun step(batch: Map<String, OnnxTensor>): Float {
        val feeds = batch + first.keys.associateWith { state(it) }
        val result = session.run(feeds, news.values.toSet() + "loss")
        last?.close()
        last = result
        return (result.get("loss").get() as OnnxTensor).floatBuffer.get(0)
    }

    /** The current value of a state; valid until the next step. */
    fun state(name: String): OnnxTensor {
        val output = news[name]
        val result = last
        return if (result == null || output == null) first.getValue(name) else result.get(output).get() as OnnxTensor
    }

    /** All states as a safetensors file, for `onnxtrain import-states`. */
    fun save(): ByteArray = Safetensors.write(
        first.keys.associateWith { name ->
            val value = state(name)
            val type = when (value.info.type) {
                OnnxJavaType.FLOAT -> "F32"
                OnnxJavaType.DOUBLE -> "F64"
                OnnxJavaType.INT64 -> "I64"
                else -> error("The state $name has the type ${value.info.type}.")
            }
            StateTensor(type, value.info.shape, value.byteBuffer.order(ByteOrder.LITTLE_ENDIAN))
        },
    )

    fun floats(values: FloatArray, vararg shape: Long): OnnxTensor =
        OnnxTensor.createTensor(environment, FloatBuffer.wrap(values), shape)

    fun integers(values: LongArray, vararg shape: Long): OnnxTensor =
        OnnxTensor.createTensor(environment, LongBuffer.wrap(values), shape)

    private fun tensorOf(tensor: StateTensor): OnnxTensor = when (tensor.type) {
        "F32" -> OnnxTensor.createTensor(environment, tensor.data.asFloatBuffer(), tensor.shape)
        "F64" -> OnnxTensor.createTensor(environment, tensor.data.asDoubleBuffer(), tensor.shape)
        "I64" -> OnnxTensor.createTensor(environment, tensor.data.asLongBuffer(), tensor.shape)
        else -> error("States of the type ${tensor.type} are not read here.")
    }

    override fun close() {
        last?.close()
        first.values.forEach { it.close() }
        session.close()
    }
}
