// Everything that was found by measuring: block sizes, what work costs beside other work, and where one way of computing
// takes over from another. `tools/measure_tuning.py` measures each by name, beside its neighbours, on the machine at hand.
//
// They were chosen, when the kernels were written, by the times of training steps (benchmarks/step.py) on two machines
// with AVX-512: an AMD EPYC of the fifth generation (48 KiB of first and 1 MiB of second cache for a core) and an Intel
// Xeon of the fifth generation (48 KiB and 2 MiB). Where a figure of that time is known it is said; a table of the
// neighbours was not kept, and the script makes one.
//
// Shares of a cache follow the machine (cache.h) where only the order of work depends on them. A figure that decides how
// a sum is taken is the same on all machines, because results must be: these are marked "bits".
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain::tuning {

// Sharing work among threads. -----------------------------------------------------------------------------------------

// Elements of a task: handing it to a thread takes a few microseconds, going through them ten.
inline constexpr std::size_t kTaskElements = 16384;

// Microseconds that an idle helper looks for new work before it sleeps: longer than what lies between the steps of a training
// loop that does nothing else, too short to be in anyone's way.
inline constexpr int kPatience = 100;

// Blocks of rows whose sums are kept apart, at most, where a normalization adds up over rows. Bits.
inline constexpr std::size_t kNormalizationBlocks = 64;

// Memory. -------------------------------------------------------------------------------------------------------------

// Bytes ahead of their use that elements are asked for: 2 KiB made Adam over ten million parameters go from 14.8 to
// 19.3 GB/s on one core of the Xeon. Square root and division fill the window of instructions in which the processor
// would see its next loads.
inline constexpr std::ptrdiff_t kAheadBytes = 2048;

// Elements that a loop over arrays takes between two looks ahead: fewer, and the compiler sees none worth vectorising.
inline constexpr std::size_t kLoopElements = 64;

// Elements that a thread clears, or adds up, at a time: of memory that it then leaves.
inline constexpr std::size_t kClearedElements = 65536, kAddedElements = 8192;

// Updates of optimizers. ----------------------------------------------------------------------------------------------

// Elements of a gradient that are prepared before their update, and of weights whose measure is taken: a few arrays of
// them fit the first cache, of 32 KiB or more.
inline constexpr std::size_t kPreparedElements = 1024, kMeasuredElements = 512;

// Normalization, softmax, pooling. ------------------------------------------------------------------------------------

// Elements of short channels that are gathered; columns of a softmax over another axis than the last, and windows of a
// row, that are looked at side by side; windows of two whose slopes are found together.
inline constexpr std::size_t kGatheredElements = 256;
inline constexpr std::size_t kSoftmaxColumns = 64;
inline constexpr std::int64_t kPooledWindows = 128;
inline constexpr std::size_t kPooledTogether = 8;

// Columns of rows that are added up side by side (the gradient of Gather).
inline constexpr std::size_t kGatherColumns = 32;

// Products of matrices. -----------------------------------------------------------------------------------------------

// Elements of the depth at a time: of a product of matrices, and of one whose sums wait in memory. Both are read from
// the second cache by then. (A depth of 256 took 1.05 to 1.1 times as long with 1,024 columns: sums are read and written
// twice as often.)
inline constexpr std::size_t kProductDepth = 512, kAccumulationDepth = 512;

// Rows that are added up at a time, beside a product whose depth they are (the gradient of a bias). Bits.
inline constexpr std::size_t kSumDepth = 256;

// The depth at a time of a product of bfloat16: as many elements, half as many bytes.
inline constexpr std::size_t kBfloat16Depth = 512;

// The columns that a part of a product has at most, in 1024ths of the second cache: all of it, at a depth of 512 floats
// 512 columns of the EPYC's. What does not stay in it is read in order from the third.
inline constexpr std::size_t kColumnsShare = 1024;

// What a part has at least: rows, columns, and multiplications, which are worth the while of a thread.
inline constexpr std::size_t kLeastRows = 48, kLeastColumns = 64, kLeastProducts = std::size_t{1} << 19;

// As how many multiplications arranging an element takes, and reading one where it lies.
inline constexpr std::size_t kArranging = 24, kReading = 8;

// With at most so many tiles of rows, arranging the columns takes longer than reading them where they are.
inline constexpr std::size_t kFewTiles = 2;

// Rows that are multiplied with all panels before the next ones, so that what is read of them stays in the second cache: of
// a product of matrices with more rows than the second figure, and of others.
inline constexpr std::size_t kProductStripRows = 96, kStripRows = 192;

// Attention. ----------------------------------------------------------------------------------------------------------

// A block of scores, in 1024ths of the second cache; and its rows: at most twelve tiles (more would see fewer masks as
// whole), at least one.
inline constexpr std::size_t kScoreShare = 256;
inline constexpr std::size_t kMostScoreRows = 72, kLeastScoreRows = 6;

// Where heads are fewer than this, queries are shared among tasks, too; not fewer than so many, since each task arranges
// the keys and values for itself.
inline constexpr std::size_t kAttentionTasks = 16, kLeastQueries = 64;

// Recurrent operators. ------------------------------------------------------------------------------------------------

// What a part of a step has at least: multiplications, which are worth that parts wait for each other, and units. A part
// that another core does costs a third of a microsecond of waiting; the multiplications take one at least.
inline constexpr std::size_t kLeastStepProducts = std::size_t{1} << 16, kLeastUnits = 32;

// Factors of the recurrent products up to this share of the second cache, in 1024ths, are read by each core at every step,
// and the rows of the batch cut into parts instead of the units; a part has so many rows at least: those of a tile.
inline constexpr std::size_t kNearFactorsShare = 512, kLeastBatchRows = 8;

// The depth of the recurrent product at once: a panel's block of it (64 columns or fewer) stays in the second cache
// while all rows of the batch are multiplied with it. Bits.
inline constexpr std::size_t kFactorDepth = 512;

// Factors of the recurrent products that take at least so many times the second cache come from further away at every
// step, and are asked for so many bytes ahead: an LSTM of 1,024 units at a batch of 8 took 0.86 of the time on the EPYC.
inline constexpr std::size_t kFarFactors = 2;
inline constexpr std::ptrdiff_t kColumnsAheadBytes = 8192;

// How often a part looks whether the others are ready, a few nanoseconds each, before it lets other threads run.
inline constexpr std::size_t kLooks = 2000;

// Convolutions. -------------------------------------------------------------------------------------------------------

// Tasks that a call is cut into where it is large enough: many for the machine's cores to share evenly, whatever their
// number, few enough to be long. Of sums over positions, and of planes. Bits.
inline constexpr std::size_t kProductTasks = 16, kPlaneTasks = 32;

// Bytes of a block's copy of the source, which a task reads many times and keeps in its core's second cache; of the sums
// of a weight's gradient; and positions of a block of the latter, at most. Which taps a block leaves out, and in which
// order blocks are added up, depends on them. Bits.
inline constexpr std::size_t kBlockBytes = 400 * 1024, kGradientSumBytes = 256 * 1024;
inline constexpr std::size_t kGradientPositions = 1024;

// Positions of a block at least, where its copy of the source is too large: fewer are not worth a copy. Bits.
inline constexpr std::ptrdiff_t kFewestPositions = 64;

// The pixels of all channels that a task gathers at a time, in 1024ths of the second cache.
inline constexpr std::size_t kPixelShare = 256;

// Bytes of arranged weights beyond which a block has more positions, because each block reads all weights; and
// positions of a block at least, with fewer and with more weights.
inline constexpr std::size_t kLargeWeights = 1024 * 1024;
inline constexpr std::size_t kLeastPositions = 96, kLeastPositionsOfLarge = 256;

// Elements of weights that a task arranges.
inline constexpr std::size_t kPackedElements = 65536;

// Elements of the depth that all rows of a block pass before the next: what a tile reads of its columns stays in the
// second cache, and of its rows in the first.
inline constexpr std::size_t kChunkDepth = 640;

// Taps that read nothing but padding are left out by classes of positions. What a tile of six rows takes beside its
// products, as products of a row with a tap's channel, and a run of taps, as products of a row with a tap; and how much
// less than all products the classes must take. Bits, where padding meets infinities.
inline constexpr double kTileCost = 1.0, kRunCost = 60.0, kClassesWorthIt = 0.94;
inline constexpr std::size_t kCostedRows = 6;

// Products first, then adding up: what adding a line of a product, and beginning a tile, cost as multiplications, of a
// vector's and of an element's; and how much less than a correlation that must be, whose padding may be skipped. Bits.
inline constexpr double kLineAdditions = 10.0, kTileStart = 8.0, kSpreadingWorthIt = 0.8;

// Tiles of Winograd's: what transforming a weight costs as multiplications, beyond what the other way arranges, and an
// element of a tile that is read or written; and how much less than a correlation that must be. Bits.
inline constexpr double kWinogradWeight = 150.0, kWinogradTile = 130.0, kWinogradWorthIt = 0.9;

// Tiles of a block, for which each weight is read once; tiles whose positions are written together; channels whose
// weights a task arranges; channels at a time. What a block reads and the sums of a point stay in the second cache.
inline constexpr std::size_t kWinogradBlock = 128, kWinogradStrip = 48, kWinogradPack = 64, kWinogradDepth = 256;

// Bytes of a group's planes up to which their shifted copies are added up (few outputs a group), and of the planes of a
// vector of groups up to which they are convolved side by side (many groups of few channels); and of how many products
// for each position and group the latter at most. Bits.
inline constexpr std::size_t kShiftedBytes = 400 * 1024, kSideBySideBytes = 640 * 1024;
inline constexpr std::size_t kSideBySideProducts = 64;

// Positions of such planes whose sums are in registers together.
inline constexpr std::size_t kPositionsAtOnce = 8;

}  // namespace onnxtrain::tuning
