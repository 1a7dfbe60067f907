package samples

import android.app.Activity
import android.os.Bundle
import android.widget.TextView
import java.io.File
import kotlin.concurrent.thread
import kotlin.random.Random

/** Trains a classifier of four numbers on made-up points, and shows the loss; the files lie in `assets`. */
class MainActivity : Activity() {
    override fun onCreate(state: Bundle?) {
        super.onCreate(state)
        val text = TextView(this).also { setContentView(it) }
        thread {
            val losses = train()
            runOnUiThread { text.text = losses.joinToString("\n") }
        }
    }

    private fun train(): List<Float> {
        val points = FloatArray(4 * 64) { Random.nextFloat() * 2 - 1 }
        val labels = LongArray(64) { row -> (0..2).maxByOrNull { points[4 * row + it] }!!.toLong() }
        val graph = StepGraph(asset("step.onnx"), asset("states.safetensors"))
        return graph.use {
            val batch = mapOf(
                "input" to graph.floats(points, 64, 4),
                "target" to graph.integers(labels, 64),
                "learning_rate" to graph.floats(floatArrayOf(0.01f)),
            )
            val losses = List(100) { graph.step(batch) }
            File(filesDir, "trained.safetensors").writeBytes(graph.save())
            batch.values.forEach { it.close() }
            losses
        }
    }

    private fun asset(name: String): ByteArray = assets.open(name).use { it.readBytes() }
}
