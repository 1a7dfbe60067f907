/** `onnxtrain.examples.small_transformer` in operations of TensorFlow.js, with the weights of a file of states. */

const HEADS = 4;

/**
 * @param tf - TensorFlow.js.
 * @param states - Tensors by name, from a step graph's states.
 * @param batch - `input_ids` and `attention_mask`, [N, S].
 * @returns A function that computes the logits [N, classes] from the weights as they are.
 */
export function transformer(tf, states, batch) {
  const weights = {};
  for (const [name, { type, dims, data }] of Object.entries(states)) {
    if (type === "float32" && !name.includes("/")) weights[name] = tf.variable(tf.tensor(data, dims));
  }
  const [count, length] = batch.input_ids.dims;
  const [words, width] = weights["embeddings.token"].shape;
  const integers = ({ data }) => tf.tensor1d(Array.from(data, Number), "int32");
  // A product with rows of ones and zeros: the gradient of gather is not there on WASM.
  const tokens = tf.oneHot(integers(batch.input_ids), words).toFloat();
  const absent = tf.sub(1, integers(batch.attention_mask).toFloat().reshape([count, 1, 1, length])).mul(-10000);

  const project = (name, value) => tf.add(tf.matMul(value, weights[`${name}.weight`]), weights[`${name}.bias`]);
  const norm = (name, value) => {
    const { mean, variance } = tf.moments(value, -1, true);
    const scaled = tf.div(tf.sub(value, mean), tf.sqrt(tf.add(variance, 1e-5)));
    return tf.add(tf.mul(scaled, weights[`${name}.scale`]), weights[`${name}.bias`]);
  };
  const gelu = (value) => {
    // By tanh: erf is not there on WASM.
    const inner = tf.mul(Math.sqrt(2 / Math.PI), tf.add(value, tf.mul(0.044715, tf.mul(value, tf.mul(value, value)))));
    return tf.mul(tf.mul(0.5, value), tf.add(1, tf.tanh(inner)));
  };
  const attention = (name, value) => {
    const size = width / HEADS;
    const heads = (part) =>
      tf.transpose(project(`${name}.${part}`, value).reshape([count, length, HEADS, size]), [0, 2, 1, 3]);
    const scores = tf.mul(tf.matMul(heads("query"), heads("key"), false, true), 1 / Math.sqrt(size));
    const mixed = tf.matMul(tf.softmax(tf.add(scores, absent)), heads("value"));
    return project(`${name}.output`, tf.transpose(mixed, [0, 2, 1, 3]).reshape([count * length, width]));
  };

  return () => {
    const position = tf.slice(weights["embeddings.position"], [0, 0], [length, width]);
    const embedded = tf.matMul(tokens, weights["embeddings.token"]).reshape([count, length, width]);
    let value = norm("embeddings.norm", tf.add(embedded, position).reshape([count * length, width]));
    for (let layer = 0; `layer${layer}.up.weight` in weights; layer++) {
      const name = `layer${layer}`;
      value = norm(`${name}.norm1`, tf.add(value, attention(`${name}.attention`, value)));
      const hidden = project(`${name}.down`, gelu(project(`${name}.up`, value)));
      value = norm(`${name}.norm2`, tf.add(value, hidden));
    }
    const first = tf.slice(value.reshape([count, length, width]), [0, 0, 0], [count, 1, width]).reshape([count, width]);
    return tf.add(tf.matMul(first, weights["classifier.weight"], false, true), weights["classifier.bias"]);
  };
}
