// Measured tuning constants: block sizes, relative costs of work, and crossover points between methods.
// `tools/measure_tuning.py` measures each by name, with its neighbours, on the current machine.
//
// They were chosen, when the kernels were written, by the times of training steps (benchmarks/step.py) on two machines
// with AVX-512: a fifth-generation AMD EPYC (48 KiB L1 and 1 MiB L2 per core) and a fifth-generation Intel Xeon (48 KiB
// and 2 MiB). Timings from then are quoted where they are known; the script measures the neighbouring values.
//
// Shares of a cache follow the machine (cache.h) where only the order of work depends on them. A constant that
// determines the order of a sum is the same on all machines, to keep results reproducible: these are marked "bits".
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain::tuning {

// Sharing work among threads. -----------------------------------------------------------------------------------------

// Elements per task: scheduling one takes a few microseconds, processing its elements ten.
inline constexpr std::size_t kTaskElements = 16384;

// Microseconds that an idle helper spins before it sleeps: longer than the gap between the steps of a tight training
// loop, too short to disturb others.
inline constexpr int kPatience = 100;

// Maximum number of row blocks with separate sums in a normalization that sums over rows. Bits.
inline constexpr std::size_t kNormalizationBlocks = 64;

// Memory. -------------------------------------------------------------------------------------------------------------

// Prefetch distance in bytes: 2 KiB raised Adam over ten million parameters from 14.8 to 19.3 GB/s on one core of the
// Xeon. Square root and division fill the reorder window before the CPU sees its next loads.
inline constexpr std::ptrdiff_t kAheadBytes = 2048;

// Elements that an array loop processes between two prefetches; with fewer the compiler does not vectorize.
inline constexpr std::size_t kLoopElements = 64;

// Elements that a thread clears, or adds up, at a time, in memory that it does not read again.
inline constexpr std::size_t kClearedElements = 65536, kAddedElements = 8192;

// Updates of optimizers. ----------------------------------------------------------------------------------------------

// Elements of a gradient that are prepared before their update, and of weights whose measure is computed: a few arrays
// of them fit an L1 cache of 32 KiB.
inline constexpr std::size_t kPreparedElements = 1024, kMeasuredElements = 512;

// Normalization, softmax, pooling. ------------------------------------------------------------------------------------

// Elements side by side of several short channels of a batch normalization that are processed together at most; a task has
// a quarter at least.
inline constexpr std::size_t kNormalizedColumns = 256;

// Elements of a batch normalization whose slopes are summed together; columns of a softmax over an inner axis, and windows
// of a row, that are processed together; 2 x 2 windows whose slopes are found together.
inline constexpr std::size_t kGatheredElements = 2048;
inline constexpr std::size_t kSoftmaxColumns = 64;
inline constexpr std::int64_t kPooledWindows = 128;
inline constexpr std::size_t kPooledTogether = 8;

// Elements of a block of a chain of element-wise operators: some steps of it fit an L1 cache of 32 KiB.
inline constexpr std::size_t kChainElements = 256;

// Columns of rows that are added up together (the gradient of Gather); bytes of the result that are cleared before the rows
// with a sum are written, which an L1 cache holds; and bits of the indices that are sorted at a time.
inline constexpr std::size_t kGatherColumns = 32;
inline constexpr std::size_t kSummedBytes = 16 * 1024, kSortedBits = 12;

// Rows that are asked for ahead while rows are added up in another order than that of memory, and bytes of each; the CPU
// goes on with longer rows by itself.
inline constexpr std::size_t kAheadRows = 12, kAheadRowBytes = 256;

// Products of matrices. -----------------------------------------------------------------------------------------------

// Depth per block: of a matrix multiplication, and of one whose sums stay in memory. Both then read from the L2 cache.
// (A depth of 256 took 1.05 to 1.1 times as long with 1,024 columns: sums are read and written twice as often.)
inline constexpr std::size_t kProductDepth = 512, kAccumulationDepth = 512;

// Rows that are added up at a time beside a multiplication over the same rows (bias gradients). Bits.
inline constexpr std::size_t kSumDepth = 256;

// Depth at a time of a product whose sums stay in the cache meanwhile, and the most bytes of these sums, in 1024ths of
// the L2 cache; a product with more sums is cut into parts, one with more than so many times these is not added up in
// the cache; lines of the right matrix that are at most so many bytes apart are read in place.
inline constexpr std::size_t kOuterDepth = 128, kOuterShare = 384, kOuterParts = 4, kNearLineBytes = 512;

// Lines of a left matrix that are packed at a time: an L1 cache holds a part of so many, wherever they lie.
inline constexpr std::size_t kPackedLines = 32;

// Depth per block of a bfloat16 multiplication: as many bytes. Tiles of AMX wait for their sums, which are read and
// written twice as often with 512: with a depth of 2,048 that took 1.2 times as long.
inline constexpr std::size_t kBfloat16Depth = 1024;

// Maximum columns per part of a multiplication, in 1024ths of the L2 cache: all of it; with a depth of 512 floats, 512
// columns on the EPYC. The rest is streamed from the L3 cache.
inline constexpr std::size_t kColumnsShare = 1024;

// Minimum rows, columns and multiplications per part that justify a thread.
inline constexpr std::size_t kLeastRows = 48, kLeastColumns = 64, kLeastProducts = std::size_t{1} << 19;

// Cost in multiplications of packing an element, and of reading one in place.
inline constexpr std::size_t kPackingCost = 24, kReadingCost = 8;

// Up to this many tiles of rows, packing the columns costs more than reading them in place.
inline constexpr std::size_t kFewTiles = 2;

// Rows that are multiplied by all panels before the next ones, so that their data stays in the L2 cache: of a matrix
// multiplication, in 1024ths of the cache, and at least so many; and of others.
inline constexpr std::size_t kStripShare = 512, kLeastStripRows = 96;
inline constexpr std::size_t kStripRows = 192;

// Products with sparse weights. ----------------------------------------------------------------------------------------

// Multiplications per task that justify a thread (they take longer than dense ones), and the most tasks of a call.
inline constexpr std::size_t kLeastSparseProducts = std::size_t{1} << 18, kSparseTasks = 64;

// Rows from which on vectors go over the rows; fewer take vectors over the outputs.
inline constexpr std::size_t kSparseRows = 8;

// Transposed rows of x that are multiplied at a time, in 1024ths of the L2 cache; at least one panel, and two where these
// take at most twice this share.
inline constexpr std::size_t kSparsePanelShare = 256;

// Bytes of x that the entries of a slice of the channels read: half of an L1 cache; those of a linear layer, whose panels are
// read again from the L2 cache by every 64 outputs; and the fewest multiplications of vectors, on average, that a block row
// has in a slice, for blocks of one output and for others. Bits.
inline constexpr std::size_t kSparseSliceBytes = 24 * 1024, kSparseLinearSliceBytes = 64 * 1024;
inline constexpr std::size_t kSparseSliceProducts = 72, kSparseSliceBlockProducts = 800;

// Linear layers under a mask take sparse products where these are expected to take at most this share of the time of the
// dense one. In dense multiply-adds: a multiplication of a single weight, of a weight in a block, and of a weight in its
// gradient; an element of x or y, which is transposed; a weight that is gathered from the dense matrix or scattered into
// it; and an element of that matrix, which is checked for zeros, or filled with them. An Intel Xeon with AVX-512;
// python benchmarks/masked_step.py --layers. Bits.
inline constexpr double kMaskedShare = 0.73;
inline constexpr double kMaskedProduct = 2.5, kMaskedBlockProduct = 1.2, kMaskedGradientProduct = 3.0;
inline constexpr double kMaskedElement = 20.0, kMaskedWeight = 150.0, kMaskedCheck = 2.0, kMaskedFill = 8.0;

// Rows of x, transposed, from which gradients of weights under a mask are added at a time, in 1024ths of the L2 cache.
// Bits.
inline constexpr std::size_t kMaskedPanelShare = 512;

// Bytes of the padded planes of a strip of an image, which stay in an L2 cache beside what is read and written. Bits.
inline constexpr std::size_t kSparseStripBytes = 320 * 1024;

// Convolutions with their MaxPool: the values and sums of some rows, in 1024ths of the L2 cache; multiply-adds per task,
// which repeats a row of its neighbour; and the most tasks of a call.
inline constexpr std::size_t kPooledShare = 320;
inline constexpr std::size_t kPooledProducts = 48 * 1024 * 1024, kPooledTasks = 64;

// Attention. ----------------------------------------------------------------------------------------------------------

// A block of scores, in 1024ths of the L2 cache; and its rows: at most twelve tiles (with more, fewer blocks are fully
// masked), at least one.
inline constexpr std::size_t kScoreShare = 256;
inline constexpr std::size_t kMostScoreRows = 72, kLeastScoreRows = 6;

// Its rows where queries see different keys, as with causal masks: with fewer rows, fewer scores are of hidden keys. At
// least the first number, and a row for every so many keys: sums of gradients are read and written once a block.
inline constexpr std::size_t kMaskedScoreRows = 12, kKeysPerMaskedRow = 32;

// With fewer heads than this, queries are split among tasks as well; at least this many per task, since each task packs
// the keys and values for itself.
inline constexpr std::size_t kAttentionTasks = 16, kLeastQueries = 64;

// Short sequences have the heads side by side in vectors: up to this many keys times elements of a head. Bits.
inline constexpr std::size_t kShortHead = 1800;
// Most keys of a short sequence; vectors of a block of its scores, which stay in the L2 cache.
inline constexpr std::size_t kShortKeys = 128, kLaneScores = 1024;

// Queries and keys from which on attention in bfloat16 pays for rounding and packing; fewer are multiplied in float. Bits.
inline constexpr std::size_t kBfloat16Positions = 32;

// Sums of the gradient of a bias that several heads share, and the most elements of all. Bits.
inline constexpr std::size_t kBiasParts = 8, kBiasElements = std::size_t{1} << 25;

// Recurrent operators. ------------------------------------------------------------------------------------------------

// Minimum multiplications and units per part of a step that justify synchronization. A part on another core costs a
// third of a microsecond of waiting; its multiplications take at least one.
inline constexpr std::size_t kLeastStepProducts = std::size_t{1} << 16, kLeastUnits = 32;

// Recurrent weights up to this share of the L2 cache, in 1024ths, are read by each core at every step, and the batch
// rows are split instead of the units; minimum rows per part: a tile's.
inline constexpr std::size_t kCachedWeightsShare = 512, kLeastBatchRows = 8;

// Depth per block of the recurrent multiplication: a panel's block (64 columns or fewer) stays in the L2 cache while
// all batch rows are multiplied by it. Bits.
inline constexpr std::size_t kFactorDepth = 512;

// Recurrent weights of at least this multiple of the L2 cache come from further away at every step, and are prefetched
// this many bytes ahead: an LSTM of 1,024 units at a batch of 8 took 0.86 of the time on the EPYC.
inline constexpr std::size_t kUncachedWeights = 2;
inline constexpr std::ptrdiff_t kColumnsAheadBytes = 8192;

// Number of polls for the other parts, a few nanoseconds each, before a part yields.
inline constexpr std::size_t kPolls = 2000;

// Convolutions. -------------------------------------------------------------------------------------------------------

// Tasks per large call: enough for cores to balance, few enough to be long. Of sums over positions, and of planes.
// Bits.
inline constexpr std::size_t kProductTasks = 16, kPlaneTasks = 32;

// Bytes of a block's copy of the source, which a task reads many times and keeps in the L2 cache; bytes of the sums of
// a weight gradient; maximum positions per block of the latter. They determine which taps a block skips, and the order
// in which blocks are added up. Bits.
inline constexpr std::size_t kBlockBytes = 400 * 1024, kGradientSumBytes = 256 * 1024;
inline constexpr std::size_t kGradientPositions = 1024;

// In bfloat16: sums of a block, in 1024ths of the L2 cache, and minimum positions of a block, for which all weights are
// read once.
inline constexpr std::size_t kBlockSumShare = 512, kLeastBlockPositions = 256;

// Words of x, and positions, that the weight gradient in bfloat16 rounds at a time: about a block of the depth, which then
// stays in the L2 cache. (All at once took 1.1 to 2.3 times as long with images of 56 x 56.) Bits.
inline constexpr std::size_t kGradientSourceWords = std::size_t{1} << 24, kGradientDepth = 1024;

// Minimum positions per block if its copy of the source is too large: fewer do not justify a copy. Bits.
inline constexpr std::ptrdiff_t kFewestPositions = 64;

// Bytes of weights of a 1 x 1 convolution whose gradient reads them as they lie: an L1 cache holds their lines. Larger ones
// are transposed, so many rows at a time.
inline constexpr std::size_t kWeightsInPlace = 24 * 1024, kTurnedRows = 64;

// Pixels of all channels that a task gathers at a time, in 1024ths of the L2 cache.
inline constexpr std::size_t kPixelShare = 256;

// Bytes of packed weights beyond which a block has more positions, because each block reads all weights; minimum
// positions per block, with fewer and with more weights.
inline constexpr std::size_t kLargeWeights = 1024 * 1024;
inline constexpr std::size_t kLeastPositions = 96, kLeastPositionsOfLarge = 256;

// Elements of weights that a task packs.
inline constexpr std::size_t kPackedElements = 65536;

// Depth that all rows of a block process before the next: a tile's columns then stay in the L2 cache, and its rows in
// the L1 cache.
inline constexpr std::size_t kChunkDepth = 640;

// Taps that read only padding are skipped by classes of positions. Cost of a tile of six rows beside its
// multiplications, in multiplications of a row by a tap's channel; cost of a run of taps, in multiplications of a row
// by a tap; and the required saving over all multiplications. Bits, where padding meets infinities.
inline constexpr double kTileCost = 1.0, kRunCost = 60.0, kClassesWorthIt = 0.94;
inline constexpr std::size_t kCostedRows = 6;

// Convolutions with positions in the lanes, for few outputs. Time of their multiplications, and of those by a single vector
// of outputs, whose tile waits for its loads, in that of others; and cost of transposing a result, in multiplications. Bits,
// where padding meets infinities.
inline constexpr double kPositionProduct = 1.1, kLonelyVector = 1.4, kTransposedElement = 12.0;

// Depth at a time of such a convolution: its weights and its source stay in the L1 cache.
inline constexpr std::size_t kPositionDepth = 160;

// Multiply, then add up: cost of adding a line, and of starting a tile, in multiplications of a vector and of an
// element; and the required saving over a correlation, which may skip padding. Bits.
inline constexpr double kLineAdditions = 10.0, kTileStart = 8.0, kSpreadingWorthIt = 0.8;

// Winograd tiles: cost in multiplications of transforming a weight, beyond the other method's packing, and of an
// element of a tile read or written; and the required saving over a correlation. Bits.
inline constexpr double kWinogradWeight = 150.0, kWinogradTile = 130.0, kWinogradWorthIt = 0.9;

// Tiles per block, for which each weight is read once; tiles whose positions are written together; channels whose
// weights a task packs; channels at a time. A block's input and the sums of a point stay in the L2 cache.
inline constexpr std::size_t kWinogradBlock = 128, kWinogradStrip = 48, kWinogradPack = 64, kWinogradDepth = 256;

// Images among which the transformation of the weights is divided where the result is computed, whatever the batch.
// Bits.
inline constexpr std::size_t kWinogradImages = 4;

// Their weight gradients: tiles per chunk, each with sums of its own, and half as many where there would be fewer tasks
// than these; cost in multiplications of a weight's sum in a chunk, and of an element of a tile read or written. Bits.
// Transformed tiles of a chunk at a time, in 1024ths of the L2 cache, and at least so many.
inline constexpr std::size_t kWinogradChunk = 128, kWinogradTasks = 4;
inline constexpr double kWinogradSum = 100.0, kWinogradGradientTile = 100.0;
inline constexpr std::size_t kWinogradShare = 640, kLeastWinogradTiles = 32;

// Bytes of a group's planes up to which their shifted copies are added up (few outputs per group); bytes of the planes
// of a vector of groups up to which they are convolved side by side (many groups of few channels); and the maximum
// multiplications per position and group for the latter. Bits.
inline constexpr std::size_t kShiftedBytes = 400 * 1024, kSideBySideBytes = 640 * 1024;
inline constexpr std::size_t kSideBySideProducts = 64;

// Positions of such planes whose sums are in registers together.
inline constexpr std::size_t kPositionsAtOnce = 8;

}  // namespace onnxtrain::tuning
