// attention_kv4_sm90: decode attention over a paged cache of 4 or 8 bits, at the speed of memory.
//
// A unit is what one sequence's cache of one KV head is read for: up to 8 queries. The tiles of all units are dealt to
// the blocks in equal pieces; the block in which a unit begins puts its parts together, always in the same order. With
// PART a unit is cut by its own length, so that a sequence has the same bits whatever else is in the batch. Of a
// block's warps one issues copies, one or two prepare queries, the others multiply, each tile by tile.
//
// Contract   out[b, t, h] = sum_i p[i] v[i], p = softmax of softmax_scale * q[b, t, h] . k[i] over the keys that query
//            t sees: i up to lengths[b] - T + t, of these the last `window` if that is not 0. lse: natural logarithm of
//            the sum of exponentials. Nothing seen: zeros, and lse -infinity. Head h reads kv head h / (Hq / Hkv). k =
//            (integer - zero) * scale per token and head, f16 in the page (CHANNEL 0), or per channel, f32 [Hkv, D]
//            (CHANNEL 1, where 8 bits are signed and have no zero). The T queries of a sequence for all heads of a
//            group are the columns of one unit, up to 8; more of them are several units.
// PDL        block table and lengths are read at once; queries and cache are read after the wait.
// Guide      notebooks/guide/kernels_attention.md: work, barriers, scores in integers, values, promotion, constants
// Measured   64 sequences of 1024 tokens, 32 heads, on an H200: 69 us, 0.90 of the speed of memory.
//            What `attention_kv4` takes for a batch, plain launches:
//            heads         16 x 1024     64 x 1024     256 x 1024    1 x 4096      64 x 4096     1 x 32768
//            32 / 32       20.7 us 0.75  69.4 us 0.90  262 us 0.95   8.9 us 0.44   262 us 0.95   38.5 us 0.81
//            32 / 8        8.2 us 0.48   21.3 us 0.73  70.8 us 0.88  6.5 us 0.15   70.9 us 0.88  13.8 us 0.56
//            64 / 8        8.7 us 0.45   22.5 us 0.69  72.9 us 0.86  7.0 us 0.14   72.0 us 0.87  14.9 us 0.52
// PTX ISA    9.7.14.5.8, 9 mma.m16n8k16 (.f16), m16n8k32 (.u8.s8, .s8.s8); 9.7.14.5.17 movmatrix; 9.7.9.25 bulk copies;
//            9.7.13.15 mbarrier; 9.7.13.16 elect; 9.7.3 ex2, lg2, rcp; 9.7.1 dp4a; 9.7.13.13 griddepcontrol
#include "griddep.cuh"
#include "hadamard.cuh"
#include "kv_page.cuh"
#include "mbarrier.cuh"
#include "pack.cuh"
#include "parts.cuh"
#include "reciprocal.cuh"
#include "segments.cuh"
#include "timeline.cuh"
#include "vector_access.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128  // 64, 128, 256
#define PAGE 64       // tokens of a page: 16, 32, 64
#define BITS 4        // of a key or value: 4, or 8
#define CHANNEL 0     // scale and zero: 0 per token, in the page; 1 per channel
#define BF16 0        // queries and results: 0 f16, 1 bf16
#define COLUMNS 8     // queries of a unit at most: 4, 8
#define TOKENS 64     // of a tile that one warp takes: 16, 32, 64
#define WARPS 8       // that multiply
#define STAGES 16     // tiles in flight
#define SLOTS 2       // units whose sums are in shared memory
#define RESIDENT 1    // blocks per SM
#define PROMOTE 0     // tokens of a warp after which its MMAs' sums are promoted, a multiple of TOKENS; 0: never
// The host uses these too, but does not choose them.
#define TILE_TOKENS 64  // of a tile
#define LARGEST 32512   // integer of a query
#define SUM_PAD 4       // floats between rows of sums in shared memory
#define EXTRA 4         // cost of a unit of few tiles, in tiles, beside them
#define SLACK 4         // tiles more than its share that a block may get
#endif
#ifndef ROTATED
#define ROTATED 0  // 1: keys are rotated by a Hadamard matrix, so queries are too
#endif
#ifndef PART
#define PART 0        // tiles after which a unit is cut, whatever the batch; 0: so that all blocks have equally much
#define MOST_PARTS 1  // of a unit that is cut; with PART the host gives both
#endif
#ifndef MOST_PARTS
#error "-D PART needs -D MOST_PARTS: the parts that a unit has at most"
#endif

namespace {

using ptxlab::TILE;
using ptxlab::u32;
using ptxlab::u64;
using Page = ptxlab::KvPage<HEAD_DIM, PAGE, BITS, CHANNEL>;

// Warps that share a tile; tiles that are multiplied at a time.
constexpr int kTileWarps = TILE / TOKENS, kGroups = WARPS / kTileWarps;
// Queries as they are prepared: dims of a lane, lanes of a column, columns that a warp takes at a time.
constexpr int kLaneDims = 8, kQueryLanes = HEAD_DIM / kLaneDims, kWarpColumns = 32 / kQueryLanes;
// Warps that prepare queries, and the passes over columns that each makes. A second warp comes only where no thread
// loses registers by it.
constexpr int kQueryWarps = RESIDENT == 1 && COLUMNS > kWarpColumns ? 2 : 1;
constexpr int kPasses = COLUMNS / (kQueryWarps * kWarpColumns);
constexpr int kProducerWarp = WARPS, kQueryWarp = WARPS + 1, kThreads = 32 * (WARPS + 1 + kQueryWarps);
constexpr int kStatLanes = WARPS <= 4 ? 4 : WARPS <= 8 ? 8 : 16;  // one for every warp that multiplies
// Stages and items
constexpr int kPages = TILE / PAGE, kStageBytes = 2 * kPages * Page::kBytes;
constexpr int kItems = 2 * SLOTS, kLag = SLOTS - 1;  // items in flight; items between summing up and combining
constexpr int kPitch = HEAD_DIM + SUM_PAD;           // floats of a row of sums
// Fragments: operands B of a query, columns of a lane, MMA tiles, words of a token's keys and values per lane
constexpr bool kPaired = COLUMNS == 4;  // the two bytes of a query are neighbouring columns of one operand B
constexpr int kOperands = kPaired ? 1 : 2, kLaneColumns = kPaired ? 1 : 2;
constexpr int kNibbles = BITS == 4 ? 2 : 1;  // of a byte
constexpr int kTokenTiles = TOKENS / 16, kDimTiles = HEAD_DIM / 16;
constexpr int kKeyWords = Page::kRowBytes / 16, kValueWords = Page::kRowBytes / 32;
constexpr int kVectorWords = kKeyWords < 4 ? kKeyWords : 4;  // of one load
constexpr u32 kOnes = 0x3c003c00;                            // two zero points of 1
static_assert(LARGEST == 127 * 256, "the high byte of a query's largest integer is a signed one");
static_assert(HEAD_DIM * (BITS == 8 ? 255ll : 15ll * 16) * LARGEST < 1ll << 31);
static_assert(TILE_TOKENS == TILE && SUM_PAD % 4 == 0);
static_assert(PROMOTE % TOKENS == 0 && WARPS % kTileWarps == 0 && STAGES % kGroups == 0 && WARPS <= 16 &&
              (COLUMNS == 4 || COLUMNS == 8));

using Segments = ptxlab::Segments<EXTRA, SLACK, (PART > kGroups ? PART : kGroups), PART, MOST_PARTS>;
using Row = ptxlab::Row<HEAD_DIM>;
using Scores = float[kTokenTiles][2 * kLaneColumns];  // of tokens g, then g + 8, of each MMA tile
using QueryWords = u32[kOperands][kNibbles][kKeyWords];

// With PART, `WorkItem::following` counts the parts of other blocks behind this one, or says that the block has the
// next part itself, or that the unit begins in an earlier block.
constexpr int kNextIsHere = -1, kBeginsEarlier = -2;

// A work item: the segment of a unit (of a sequence, up to COLUMNS queries of one of its KV heads) that the block has.
struct WorkItem {
    int tiles, position, length;     // tiles, 0 behind the last item; its first token; tokens of the sequence
    int first_group;                 // of warps, which takes the first tile
    int head, columns;               // KV head; queries
    int blocks;                      // that have tiles of the unit, this one included; 0 where it begins earlier
    int part_index, following;       // with PART: where the part lies in the workspace
    int row[COLUMNS], end[COLUMNS];  // of a column: its row of the results; the first token that it does not see
};

struct Arguments {
    const unsigned short* q;
    const unsigned char* pool;
    const int *table, *lengths;
    const float *k_scale, *k_zero, *v_scale, *v_zero;
    unsigned short* out;
    float* lse;
    u32 *partial, *stats;
    float softmax_scale;
    int B, T, Hq, Hkv, P, window;

    // Heads that share a KV head; units that these make; columns of a unit at most.
    int group = int(float(Hq) * ptxlab::reciprocal_approx(float(Hkv)) + 0.5f);
    int splits = unsigned(group * T + COLUMNS - 1) / COLUMNS;
    int columns = min(COLUMNS, group* T);

    __device__ __forceinline__ int head_of(const Segments& segment) const {
        return splits == 1 ? segment.unit_index : Segments::div(segment.unit_index, splits);
    }
};

// An item's queries as the warps that multiply read them.
struct alignas(16) QueryOperands {
    u32 fragments[kOperands][kNibbles][32][kKeyWords];
    float2 columns[COLUMNS];  // minus the sum of a query's integers; the factor of its scores
};

struct SharedMemory {
    unsigned char stages[STAGES][kStageBytes];
    QueryOperands queries[kItems];
};

// Barriers, and records of the items in flight.
struct Control {
    u64 full[STAGES], empty[STAGES];
    u64 ready[kItems], summed[kItems], cleared[kItems];
    WorkItem items[kItems];

    // Initialise the barriers, by one lane of every warp that multiplies: one lane for all would make one after the
    // other.
    __device__ __forceinline__ void init(int warp) {
#pragma unroll
        for (int i = 0; i < STAGES; i += WARPS)
            if (i + warp < STAGES)
                ptxlab::mbarrier_init(&full[i + warp], 1), ptxlab::mbarrier_init(&empty[i + warp], kTileWarps * 32);
#pragma unroll
        for (int i = 0; i < kItems; i += WARPS)
            if (i + warp < kItems) {
                ptxlab::mbarrier_init(&ready[i + warp], kQueryWarps * 32);
                ptxlab::mbarrier_init(&summed[i + warp], WARPS * 32);
                ptxlab::mbarrier_init(&cleared[i + warp], WARPS * 32);
            }
        ptxlab::fence_mbarrier_init();
    }
};

// The warps' sums of SLOTS items, behind the rest of the shared memory.
struct WarpSums {
    float4* stats;  // [SLOTS][columns][WARPS]: largest score, sum of weights, sum of weights times zero points
    float* rows;    // [SLOTS][WARPS][columns][kPitch]
    int columns;

    __device__ __forceinline__ WarpSums(SharedMemory& shared, int columns)
        : stats(reinterpret_cast<float4*>(&shared + 1)),
          rows(reinterpret_cast<float*>(stats + SLOTS * WARPS * columns)), columns(columns) {}

    __device__ __forceinline__ float4* stat(int item_index, int column, int warp) const {
        return stats + (item_index % SLOTS * columns + column) * WARPS + warp;
    }
    // Columns are reordered so that lanes of heads of 128 store to all banks.
    __device__ __forceinline__ float* row(int item_index, int warp, int column) const {
        const int reordered = column % kLaneColumns * ((columns + 1) / 2) + column / kLaneColumns;
        return rows + ((item_index % SLOTS * WARPS + warp) * columns + reordered) * kPitch;
    }
};

// The warp that copies the block's pages, tile by tile. Its lanes hold the table's entries of up to 32 pages, while the
// next ones are looked up.
struct PageProducer {
    const Arguments& arguments;
    Segments segment;
    int page = 0, pages = 0;       // of the segment, the page that is looked up next, and how many it has
    int looked_up = 0;             // the lane's entry of the table
    int entry, entry_count, head;  // the same of the pages that are copied, how many they are, their KV head

    __device__ __forceinline__ PageProducer(const Segments& segment, const Arguments& arguments)
        : arguments(arguments), segment(segment) {
        look_up();
    }

    __device__ __forceinline__ void look_up() {  // a tile that has fewer pages gets the last one again
        if (!segment.has_segment()) return;
        const int first_page = (segment.window_tile + segment.first_tile()) * kPages;
        pages = min(segment.tile_count() * kPages, (segment.length + PAGE - 1) / PAGE - first_page);
        looked_up = arguments.table[size_t(segment.sequence) * arguments.P + first_page +
                                    min(page + int(threadIdx.x % 32), pages - 1)];
    }
    __device__ __forceinline__ bool next() {
        if (!segment.has_segment()) return false;
        entry = looked_up, entry_count = min(32, pages - page), head = arguments.head_of(segment);
        return true;
    }
    __device__ __forceinline__ void look_ahead() {
        page += 32;
        if (page >= pages) page = 0, segment.advance();
        look_up();
    }

    __device__ __forceinline__ void copy_tile(unsigned char* stage, u64* full, int first_entry, bool elected) const {
        const size_t pitch = size_t(arguments.Hkv) * Page::kBytes;
        const unsigned char* const head_pages = arguments.pool + head * size_t(Page::kBytes);
        if (elected) ptxlab::mbarrier_arrive_expect(full, kStageBytes);
#pragma unroll
        for (int j = 0; j < kPages; ++j) {
            const unsigned char* keys = head_pages + size_t(__shfl_sync(~0u, entry, first_entry + j)) * (2 * pitch);
            if (elected) ptxlab::bulk_load_once(stage + j * Page::kBytes, keys, Page::kBytes, full);
            if (elected) ptxlab::bulk_load_once(stage + (kPages + j) * Page::kBytes, keys + pitch, Page::kBytes, full);
        }
    }

    // Copy all of the block's tiles in order, each into the next stage once that is empty.
    __device__ __forceinline__ void run(SharedMemory& shared, Control& control TIMELINE_PARAMETER) {
        const bool elected = ptxlab::elect();
        ptxlab::Slot<STAGES> slot;
        ptxlab::wait_for_predecessors();
        while (next())
            for (int i = 0; i < entry_count; i += kPages, slot.advance()) {
                PHASE(WAIT_GROUP);
                ptxlab::mbarrier_wait(&control.empty[slot.index], slot.parity ^ 1);  // the first round finds them empty
                PHASE(LOAD);
                copy_tile(shared.stages[slot.index], &control.full[slot.index], i, elected);
                if (i == 0) look_ahead();  // once the first tile is on its way
            }
    }
};

// The query warps: turn queries into integers of two signed bytes, and write the items' records. A block runs this code
// only a few times, so fetching its instructions is what takes time. A lane has few elements, so that the unrolled code
// is short.
struct QueryQuantiser {
    const Arguments& arguments;
    Segments segment;                                                       // whose queries are loaded
    int warp = threadIdx.x / 32 - kQueryWarp;                               // of those that quantise
    int lane = threadIdx.x % kQueryLanes, first_dim = lane * kLaneDims;     // of a column
    int own_column = warp * kWarpColumns + threadIdx.x % 32 / kQueryLanes;  // of the item, in the first pass
    u32 raw[kPasses][kLaneDims / 2];                                        // of the lane's columns
    int token[kPasses], row[kPasses];                                       // query of the sequence, row of q
    int head = 0, first_column = 0;  // KV head; which of its queries is the item's first
    int first_group = 0;             // of warps, for the next item

    __device__ __forceinline__ QueryQuantiser(const Segments& segment, const Arguments& arguments)
        : arguments(arguments), segment(segment) {}

    __device__ __forceinline__ int column(int pass) const { return own_column + pass * kQueryWarps * kWarpColumns; }

    // Load the lane's dims of the columns of `segment`, and note where each column's query is; columns past the last
    // query are zeros.
    __device__ __forceinline__ void load() {
        const int queries = arguments.group * arguments.T;
        head = arguments.head_of(segment);
        first_column = (segment.unit_index - head * arguments.splits) * COLUMNS;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const int query = first_column + column(pass);
            token[pass] = arguments.T == 1 ? 0 : Segments::div(query, arguments.group);
            row[pass] = (segment.sequence * arguments.T + token[pass]) * arguments.Hq + head * arguments.group + query -
                        token[pass] * arguments.group;
#pragma unroll
            for (int i = 0; i < kLaneDims / 2; ++i) raw[pass][i] = 0;
            if (query < queries) ptxlab::load_words(raw[pass], arguments.q + size_t(row[pass]) * HEAD_DIM + first_dim);
        }
    }

    // Convert the lane's elements of a column to f32, times the keys' scales if these are per channel, and rotate them
    // if keys are rotated. Return the largest magnitude of the column.
    __device__ __forceinline__ float convert(float (&x)[kLaneDims], int pass) const {
#pragma unroll
        for (int e = 0; e < kLaneDims; ++e) {
            x[e] = ptxlab::element<BF16>(raw[pass][e / 2], e % 2);
            if (CHANNEL) x[e] *= arguments.k_scale[head * HEAD_DIM + first_dim + e];
        }
        if constexpr (ROTATED) ptxlab::rotate_head<kLaneDims, kQueryLanes>(x, lane);
        float largest = 0x1p-100f;
#pragma unroll
        for (int e = 0; e < kLaneDims; ++e) largest = ptxlab::max_nan(largest, fabsf(x[e]));
#pragma unroll
        for (int lane_distance = 1; lane_distance < kQueryLanes; lane_distance *= 2)
            largest = ptxlab::max_nan(largest, __shfl_xor_sync(~0u, largest, lane_distance));
        return largest;
    }

    // Round the lane's elements of a column to multiples of a step, and store them. Return the sum of the column's
    // integers, each times the keys' zero point if that is per channel.
    __device__ __forceinline__ float quantise(QueryOperands& operands, const float (&x)[kLaneDims], float inverse_step,
                                              int item_head, int pass) const {
        float zero_sum = 0;
        int sum = 0;
#pragma unroll
        for (int quad = 0; quad < kLaneDims / 4; ++quad) {
            int bits[4], upper[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int e = quad * 4 + i;
                const float shifted = fmaf(x[e], inverse_step, ptxlab::SHIFT);
                if (CHANNEL && !Page::kSigned)
                    zero_sum += (shifted - ptxlab::SHIFT) * arguments.k_zero[item_head * HEAD_DIM + first_dim + e];
                bits[i] = __float_as_int(shifted), upper[i] = bits[i] + 128;
            }
            const u32 high = ptxlab::bytes_of<1>(upper), low = ptxlab::bytes_of<0>(bits);
            sum += __dp4a(int(high), 0x01010101, 0) * 256 + __dp4a(int(low), 0x01010101, 0);
            store(operands, high, low, column(pass), quad);
        }
        return CHANNEL ? add_lanes(zero_sum) : float(add_lanes(sum));
    }

    // Add up a number over the lanes of a column.
    template <class T>
    __device__ __forceinline__ static T add_lanes(T sum) {
#pragma unroll
        for (int lane_distance = 1; lane_distance < kQueryLanes; lane_distance *= 2)
            sum += __shfl_xor_sync(~0u, sum, lane_distance);
        return sum;
    }

    // Store the bytes of four dims where the lane that multiplies them reads its words.
    __device__ __forceinline__ void store(QueryOperands& operands, u32 high, u32 low, int column, int quad) const {
        const int word = (first_dim + (kNibbles == 1 ? quad * 4 : 0)) / Page::kPerWord, nibble = quad % kNibbles;
        const int t = word / kVectorWords % 4, w = word / (4 * kVectorWords) * kVectorWords + word % kVectorWords;
        const int g = kPaired ? 2 * column : column;
        operands.fragments[0][nibble][4 * g + t][w] = high;
        operands.fragments[kOperands - 1][nibble][4 * (g + kPaired) + t][w] = low;
    }

    // Write the record of a segment's item.
    __device__ __forceinline__ void describe(WorkItem& item, const Segments& segment, int item_head, int columns) {
        const int first_tile = segment.first_tile(), tiles = segment.tile_count();
        item.tiles = tiles, item.position = (segment.window_tile + first_tile) * TILE, item.length = segment.length;
        item.first_group = first_group;
        item.head = item_head, item.columns = columns;
        if constexpr (PART > 0) {
            const int number = segment.part_index();
            item.part_index = segment.first_block() * MOST_PARTS + number;
            item.following = !segment.begins_here() ? kBeginsEarlier
                             : segment.ends_here()  ? segment.part_count() - number - 1
                                                    : kNextIsHere;
        } else {
            item.blocks = first_tile > 0 ? 0 : tiles == segment.tiles ? 1 : segment.block_count();
        }
        first_group = (first_group + tiles) % kGroups;
    }

    // Prepare the queries of the next item; those of the one behind it are loaded meanwhile.
    __device__ __forceinline__ void produce(SharedMemory& shared, Control& control,
                                            const ptxlab::Slot<kItems>& slot TIMELINE_PARAMETER) {
        constexpr float kNibbleFactor = BITS == 4 ? 16 : 1;
        const Segments item_segment = segment;
        const int item_head = head, columns = min(arguments.columns, arguments.group * arguments.T - first_column);
        float x[kPasses][kLaneDims], step[kPasses];
        int item_row[kPasses], end[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            item_row[pass] = row[pass], end[pass] = segment.length - arguments.T + 1 + token[pass];
            const float largest = convert(x[pass], pass);
            step[pass] = largest * (1.0f / LARGEST) + (largest - largest);  // NaN of infinity too
        }
        segment.advance();
        if (segment.has_segment()) load();
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&control.cleared[slot.index], slot.parity ^ 1);  // the item that was in this slot is done
        PHASE(SETUP);
        QueryOperands& operands = shared.queries[slot.index];
        WorkItem& item = control.items[slot.index];
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
            const float sum = quantise(operands, x[pass], ptxlab::reciprocal_approx(step[pass]), item_head, pass);
            if (lane > 0) continue;
            operands.columns[column(pass)] = make_float2(
                sum * -kNibbleFactor, step[pass] * (arguments.softmax_scale * ptxlab::kLog2E / kNibbleFactor));
            item.row[column(pass)] = item_row[pass], item.end[column(pass)] = end[pass];
        }
        if (threadIdx.x == kQueryWarp * 32) describe(item, item_segment, item_head, columns);
        ptxlab::mbarrier_arrive(&control.ready[slot.index]);
    }

    // Prepare the queries of the block's items, then a record without tiles, which ends the consumers' loops. Last,
    // store the results of empty sequences.
    __device__ __forceinline__ void run(SharedMemory& shared, Control& control TIMELINE_PARAMETER) {
        ptxlab::Slot<kItems> slot;
        ptxlab::wait_for_predecessors();
        if (segment.has_segment()) load();
        for (; segment.has_segment(); slot.advance()) produce(shared, control, slot TIMELINE_ARGUMENT);
        ptxlab::mbarrier_wait(&control.cleared[slot.index], slot.parity ^ 1);
        if (threadIdx.x == kQueryWarp * 32) control.items[slot.index].tiles = 0;
        ptxlab::mbarrier_arrive(&control.ready[slot.index]);
        ptxlab::store_empty_sequences(arguments.out, arguments.lse, arguments.lengths, arguments.B,
                                      arguments.T * arguments.Hq, HEAD_DIM, threadIdx.x - kQueryWarp * 32,
                                      32 * kQueryWarps);
    }
};

// A lane's words of an item's queries, and the sums and factors that its columns' scores are computed with.
struct Query {
    QueryWords words;
    float column_sum[kLaneColumns], factor[kLaneColumns];

    __device__ __forceinline__ explicit Query(const QueryOperands& operands) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < kOperands * kNibbles; ++i)
            ptxlab::load_words(words[i / kNibbles][i % kNibbles], operands.fragments[i / kNibbles][i % kNibbles][lane]);
#pragma unroll
        for (int b = 0; b < kLaneColumns; ++b) {
            const float2 column = operands.columns[kLaneColumns * (lane % 4) + b];
            column_sum[b] = column.x, factor[b] = column.y;
        }
    }
};

// Constants of a warp's tokens: (scale, zero) of tokens g and g + 8 of each MMA tile, and the values' zero points of
// tokens 2 t, 2 t + 1 and 8 behind them.
struct TokenConstants {
    u32 keys[kTokenTiles][2], values[kTokenTiles][2], value_zeros[kTokenTiles][2];

    __device__ __forceinline__ TokenConstants(const unsigned char* key_pages, const unsigned char* value_pages,
                                              int first_token) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int token = first_token + i * 16 + h * 8;
                keys[i][h] = values[i][h] = ptxlab::kNeutralConstants, value_zeros[i][h] = kOnes;
                if (CHANNEL) continue;
                keys[i][h] = *reinterpret_cast<const u32*>(key_pages + Page::constants_offset(token + g));
                values[i][h] = *reinterpret_cast<const u32*>(value_pages + Page::constants_offset(token + g));
                const uint2 pairs =
                    *reinterpret_cast<const uint2*>(value_pages + Page::constants_offset(token + 2 * t));
                value_zeros[i][h] = __byte_perm(pairs.x, pairs.y, 0x7632);
            }
    }

    // Replace the constants of tokens behind the end, where there may be anything.
    __device__ __forceinline__ void mask(int tokens) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int valid = tokens - i * 16 - h * 8;
                if (g >= valid) keys[i][h] = values[i][h] = ptxlab::kNeutralConstants;
                if (2 * t >= valid) value_zeros[i][h] = 0;
                else if (2 * t + 1 >= valid) value_zeros[i][h] &= 0xffff;
            }
    }
};

// Return the bytes of a word of keys as an operand: of 4 bits its low nibbles, or 16 times its high ones.
__device__ __forceinline__ u32 key_bytes(u32 word, int nibble) {
    return BITS == 8 ? word : nibble ? word & 0xf0f0f0f0u : word & 0x0f0f0f0fu;
}

// Combine the sums of a query's high and low bytes into one number, times 16 where there are nibbles. Neither these
// sums nor that number leaves the range of an s32.
__device__ __forceinline__ float combine_bytes(const int (&sums)[kOperands][kNibbles][4], int e) {
    int of_bytes[2];  // the query's high byte, its low one
#pragma unroll
    for (int byte = 0; byte < 2; ++byte) {
        const int operand = kPaired ? 0 : byte, element = kPaired ? e * 2 + byte : e;
        const int low = sums[operand][0][element], high = sums[operand][kNibbles - 1][element];
        of_bytes[byte] = BITS == 8 ? low : low * 16 + high;
    }
    return float(of_bytes[0] * 256 + of_bytes[1]);
}

// Compute S = K Q^T of a warp's tokens: integers, not yet scaled.
__device__ __forceinline__ void multiply_keys(Scores& s, const unsigned char* keys, int first_token,
                                              const QueryWords& query) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int sums[kTokenTiles][kOperands][kNibbles][4] = {};
#pragma unroll
    for (int c = 0; c < kKeyWords; c += kVectorWords) {
        u32 upper[kTokenTiles][kVectorWords], lower[kTokenTiles][kVectorWords];  // rows g, rows g + 8
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
            const unsigned char* row =
                keys + Page::row_offset(first_token + i * 16) + g * Page::kRowBytes + (c * 4 + t * kVectorWords) * 4;
            ptxlab::load_words(upper[i], row);
            ptxlab::load_words(lower[i], row + 8 * Page::kRowBytes);
        }
#pragma unroll
        for (int w = 0; w < kVectorWords; w += 2)
#pragma unroll
            for (int n = 0; n < kNibbles; ++n)
#pragma unroll
                for (int i = 0; i < kTokenTiles; ++i) {  // innermost: an MMA waits for the one before with its sums
                    const u32 a0 = key_bytes(upper[i][w], n), a1 = key_bytes(lower[i][w], n);
                    const u32 a2 = key_bytes(upper[i][w + 1], n), a3 = key_bytes(lower[i][w + 1], n);
#pragma unroll
                    for (int b = 0; b < kOperands; ++b)
                        (Page::kSigned ? ptxlab::mma_s8 : ptxlab::mma_u8)(sums[i][b][n], a0, a1, a2, a3,
                                                                          query[b][n][c + w], query[b][n][c + w + 1]);
                }
    }
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
        for (int e = 0; e < 2 * kLaneColumns; ++e) s[i][e] = combine_bytes(sums[i], e);
}

// Scale integers to scores in base 2, and add the logarithm of the value's scale. Set `inverse` to one over that scale,
// which turns a weight times its value's scale back into the weight.
__device__ __forceinline__ void scale_scores(Scores& s, float (&inverse)[kTokenTiles][2], const Query& query,
                                             const TokenConstants& constants) {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 key = constants.keys[i][h];
            const float scale = ptxlab::low_half(constants.values[i][h]);
            const float log_scale = CHANNEL ? 0 : ptxlab::log2_approx(scale);
            inverse[i][h] = CHANNEL ? 1 : ptxlab::reciprocal_approx(scale);
#pragma unroll
            for (int b = 0; b < kLaneColumns; ++b) {
                float& x = s[i][h * kLaneColumns + b];
                x += CHANNEL ? query.column_sum[b] : ptxlab::high_half(key) * query.column_sum[b];
                x = (CHANNEL ? x : x * ptxlab::low_half(key)) * query.factor[b] + log_scale;
            }
        }
}

// Set scores of tokens that a column does not see to -infinity.
__device__ __forceinline__ void mask_scores(Scores& s, const WorkItem& item, int position, int window) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < kLaneColumns; ++b) {
        const int end = item.end[kLaneColumns * t + b];
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int token = position + i * 16 + h * 8 + g;
                if (token >= end || (window > 0 && token < end - window))
                    s[i][h * kLaneColumns + b] = -ptxlab::infinity();
            }
    }
}

// O^T += V^T P^T for 16 tokens whose values begin at `rows`. Lanes with odd t load the second of a pair of tokens
// first, which halves the bank conflicts.
__device__ __forceinline__ void multiply_values(float (&o)[kDimTiles][4], const unsigned char* rows,
                                                const u32 (&weights)[2]) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, odd = t % 2;
    const u32 select[2] = {odd ? 0x1054u : 0x5410u, odd ? 0x3276u : 0x7632u};  // low halves, high halves
    u32 first_words[2][kValueWords], second_words[2][kValueWords];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const unsigned char* row = rows + (h * 8 + t * 2) * Page::kRowBytes + g * kValueWords * 4;
        ptxlab::load_words(first_words[h], row + odd * Page::kRowBytes);
        ptxlab::load_words(second_words[h], row + (1 - odd) * Page::kRowBytes);
    }
#pragma unroll
    for (int w = 0; w < kValueWords; ++w)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            u32 a[Page::kPairs], b[Page::kPairs];
            ptxlab::subnormals_in_bytes<BITS>(
                a, __byte_perm(first_words[0][w], second_words[0][w], select[k]) ^ Page::kSignBits);
            ptxlab::subnormals_in_bytes<BITS>(
                b, __byte_perm(first_words[1][w], second_words[1][w], select[k]) ^ Page::kSignBits);
#pragma unroll
            for (int r = 0; r < Page::kPairs; r += 2)
                ptxlab::mma_f16(o[w * Page::kPairs + k * (Page::kPairs / 2) + r / 2], a[r], a[r + 1], b[r], b[r + 1],
                                weights[0], weights[1]);
        }
}

// Softmax of a lane's columns: largest scores and sums of weights from the item's first tile on, accumulators since the
// last promotion.
struct Softmax {
    float largest[kLaneColumns], weights[kLaneColumns];
    float o[kDimTiles][4], zeros[4];

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (int b = 0; b < kLaneColumns; ++b) largest[b] = ptxlab::kLowestScore, weights[b] = 0;
    }

    __device__ __forceinline__ void clear_accumulators() {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            zeros[e] = 0;
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) o[d][e] = 0;
        }
    }

    // Raise the columns' largest scores to those of a tile, and scale the sums down to them.
    __device__ __forceinline__ void raise(const Scores& s) {
        float previous[kLaneColumns];
        bool raised = false;
#pragma unroll
        for (int b = 0; b < kLaneColumns; ++b) {
            float peak = ptxlab::kLowestScore;
#pragma unroll
            for (int i = 0; i < kTokenTiles; ++i) peak = fmaxf(peak, fmaxf(s[i][b], s[i][kLaneColumns + b]));
#pragma unroll
            for (int lane_distance = 4; lane_distance < 32; lane_distance *= 2)
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, lane_distance));
            previous[b] = largest[b], largest[b] = fmaxf(largest[b], peak), raised |= largest[b] > previous[b];
        }
        if (!__any_sync(~0u, raised)) return;
#pragma unroll
        for (int b = 0; b < kLaneColumns; ++b) {
            const float rescale = ptxlab::exp2_approx(previous[b] - largest[b]);
            weights[b] *= rescale, zeros[b] *= rescale;
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) o[d][b] *= rescale, o[d][b + 2] *= rescale;
        }
    }

    // Add a tile's weighted values to the accumulators.
    __device__ __forceinline__ void add_values(const Scores& s, const float (&inverse)[kTokenTiles][2],
                                               const TokenConstants& constants, const unsigned char* values,
                                               int first_token) {
#pragma unroll
        for (int i = 0; i < kTokenTiles; ++i) {
            u32 p[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float weight[2] = {};
#pragma unroll
                for (int b = 0; b < kLaneColumns; ++b)
                    weight[b] = ptxlab::exp2_approx(s[i][h * kLaneColumns + b] - largest[b]),
                    weights[b] += weight[b] * inverse[i][h];
                p[h] = ptxlab::transpose_8x8(ptxlab::half_pair(weight[0], weight[1]));
            }
            const u32(&zero)[2] = constants.value_zeros[i];
            ptxlab::mma_f16(zeros, zero[0], zero[0], zero[1], zero[1], p[0], p[1]);
            multiply_values(o, values + Page::row_offset(first_token + i * 16), p);
        }
    }

    // Collect the lane's dims of column b in order. Of every four, two come from an MMA tile of low halves and two from
    // one of high halves. A tile of high nibbles was multiplied with the low ones still in its bytes, so the sums of
    // these, which are the tile before, are subtracted.
    __device__ __forceinline__ void gather(float (&sums)[HEAD_DIM / 8], int b) const {
#pragma unroll
        for (int e = 0; e < HEAD_DIM / 8; ++e) {
            const int tile =
                e / Page::kPerWord * Page::kPairs + e % Page::kPerWord / 4 + e % 4 / 2 * (Page::kPairs / 2);
            const int i = b + e % 2 * 2;
            const bool in_bytes = BITS == 4 && e % Page::kPerWord >= 4;
            sums[e] = in_bytes ? o[tile][i] - o[tile - 1][i] : o[tile][i];
        }
    }

    // Write the warp's sums of an item to shared memory, or add them to those that it has promoted before.
    __device__ __forceinline__ void promote(const WarpSums& warp_sums, int item_index, int warp, bool is_first) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int b = 0; b < kLaneColumns; ++b) {
            float weight_sum = weights[b], sums[HEAD_DIM / 8];
#pragma unroll
            for (int lane_distance = 4; lane_distance < 32; lane_distance *= 2)
                weight_sum += __shfl_xor_sync(~0u, weight_sum, lane_distance);
            gather(sums, b);
            const int column = kLaneColumns * t + b;
            float4* const stat = warp_sums.stat(item_index, column, warp);
            float* const row = warp_sums.row(item_index, warp, column) + g * (HEAD_DIM / 8);
            if (!is_first) {
                asm volatile("");  // keeps it a branch: few items need it
                __syncwarp();      // a lane of row 0 has written the statistics
                if (column < warp_sums.columns) {
                    const float rescale = ptxlab::exp2_approx(stat->x - largest[b]);
                    zeros[b] += stat->z * rescale;
#pragma unroll
                    for (int e = 0; e < HEAD_DIM / 8; ++e) sums[e] += row[e] * rescale;
                }
                __syncwarp();  // all have read them
            }
            if (column >= warp_sums.columns) continue;
            if (g == 0) *stat = make_float4(largest[b], CHANNEL ? zeros[b] : weight_sum, zeros[b], 0);
#pragma unroll
            for (int e = 0; e < HEAD_DIM / 8; e += 4) {
                const u32 words[4] = {__float_as_uint(sums[e]), __float_as_uint(sums[e + 1]),
                                      __float_as_uint(sums[e + 2]), __float_as_uint(sums[e + 3])};
                ptxlab::store_words(row + e, words);
            }
        }
    }
};

// Combines the warps' sums of an item into results, or parts of them. A warp takes a column, in every item another.
struct Combiner {
    const Arguments& arguments;
    Control& control;
    const WarpSums& warp_sums;
    int warp;

    // Add up the warps' sums of a column: its row, unnormalised. With PART sums are added up from the warps of the
    // first tile on.
    __device__ __forceinline__ Row add_warps(int item_index, const WorkItem& item, int column) const {
        const int lane = threadIdx.x % kStatLanes, first_warp = PART ? item.first_group * kTileWarps : 0;
        const int stat_warp = PART && lane < WARPS ? (lane + first_warp) % WARPS : lane;
        const bool active =
            stat_warp < WARPS && (stat_warp / kTileWarps - item.first_group + kGroups) % kGroups < item.tiles;
        const u32 active_warps = __ballot_sync(~0u, active);
        const float4 stat =
            active ? *warp_sums.stat(item_index, column, stat_warp) : make_float4(ptxlab::kLowestScore, 0, 0, 0);
        Row row = {};
        float zero_sum;
        const float factor = row.combine_stats<kStatLanes>(stat, zero_sum);
        row.add_warps<WARPS>(warp_sums.row(item_index, 0, column), warp_sums.columns * kPitch, factor, active_warps,
                             first_warp);
        const float correction = BITS == 8 || threadIdx.x % 2 == 0 ? 0x1p24f : 0x1p20f;  // integers were subnormals
        Page::restore(row, zero_sum, correction, arguments.v_scale + item.head * HEAD_DIM,
                      arguments.v_zero + item.head * HEAD_DIM);
        return row;
    }

    // Store a row's results, after the other blocks' parts have been added, if its unit begins in this block; else hand
    // the row over to the block where the unit begins.
    __device__ __forceinline__ void deliver(Row& row, const WorkItem& item, int column) const {
        const int columns = arguments.columns;
        if (item.blocks == 0) {
            row.hand_over(arguments.partial, arguments.stats, size_t(blockIdx.x) * columns + column);
            return;
        }
        if (item.blocks > 1)
            row.take_over(arguments.partial, arguments.stats, (size_t(blockIdx.x) + 1) * columns + column, columns,
                          item.blocks - 1);
        row.store<BF16>(arguments.out, arguments.lse, item.row[column]);
    }

    // Deliver a row with PART: parts are added one by one, from the first on. A column is always the same warp's, which
    // finds in the workspace what it has left there.
    __device__ __forceinline__ void deliver_part(Row& row, const WorkItem& item, int column) const {
        const int columns = arguments.columns;
        const size_t part_row = size_t(item.part_index) * columns + column,
                     first_part = size_t(item.part_index / MOST_PARTS * MOST_PARTS) * columns + column;
        if (item.following != kBeginsEarlier && part_row != first_part) {
            Row sum = Row::reclaim(arguments.partial, arguments.stats, first_part);
            sum.add_part(make_float2(row.largest, row.sum), row.v), row = sum;
        }
        if (item.following < 0) {
            row.hand_over(arguments.partial, arguments.stats, item.following == kNextIsHere ? first_part : part_row);
            return;
        }
        if (item.following > 0)
            row.take_over<true>(arguments.partial, arguments.stats, part_row + columns, columns, item.following);
        row.store<BF16>(arguments.out, arguments.lse, item.row[column]);
    }

    // Add up the warps' sums of an item once all are there, deliver the rows of this warp's columns, and clear the
    // slot, which is free when all warps have done so.
    __device__ __forceinline__ void combine_item(int item_index TIMELINE_PARAMETER) const {
        const int slot = item_index % kItems;
        const WorkItem& item = control.items[slot];
        PHASE(WAIT_GROUP);
        ptxlab::mbarrier_wait(&control.summed[slot], item_index / kItems % 2);
        PHASE(EPILOGUE);
        for (int column = PART ? warp : (warp + item_index) % WARPS; column < item.columns; column += WARPS) {
            Row row = add_warps(item_index, item, column);
            if (PART > 0) deliver_part(row, item, column);
            else deliver(row, item, column);
        }
        ptxlab::mbarrier_arrive(&control.cleared[slot]);
    }
};

// A warp that multiplies its tokens of every kGroups-th tile.
struct Consumer {
    const Arguments& arguments;
    SharedMemory& shared;
    Control& control;
    const WarpSums& warp_sums;
    int warp, group = warp / kTileWarps;           // of warps
    int first_token = warp % kTileWarps * TOKENS;  // of a tile
    int stage = group, parity = 0;                 // of the next tile

    __device__ __forceinline__ void release_stage() {
        ptxlab::mbarrier_arrive(&control.empty[stage]);
        if ((stage += kGroups) >= STAGES) stage -= STAGES, parity ^= 1;
    }

    // Process the warp's tokens of a tile, from `position` of the sequence on: scores, softmax, values.
    __device__ __forceinline__ void process_tile(Softmax& softmax, const Query& query, const WorkItem& item, int length,
                                                 int position TIMELINE_PARAMETER) {
        const int window = arguments.window;
        const bool masked = position + TOKENS > length - arguments.T + 1 || (window > 0 && position < length - window);
        const unsigned char* keys = shared.stages[stage];
        const unsigned char* values = keys + kPages * Page::kBytes;
        PHASE(WAIT_COPY);
        ptxlab::mbarrier_wait(&control.full[stage], parity);
        PHASE(SCORES);
        TokenConstants constants(keys, values, first_token);
        if (!CHANNEL && masked) {
            asm volatile("");  // keeps it a branch: few tiles need it
            constants.mask(length - position);
        }
        Scores s;
        multiply_keys(s, keys, first_token, query.words);
        PHASE(SOFTMAX);
        float inverse[kTokenTiles][2];
        scale_scores(s, inverse, query, constants);
        if (masked) {
            asm volatile("");
            mask_scores(s, item, position, window);
        }
        softmax.raise(s);
        PHASE(VALUES);
        softmax.add_values(s, inverse, constants, values, first_token);
        release_stage();
    }

    // Sum up the warp's tiles of an item, from `first_tile` on.
    __device__ __forceinline__ void process_item(int item_index, const WorkItem& item, int tiles,
                                                 int first_tile TIMELINE_PARAMETER) {
        const int length = item.length, first_position = item.position + first_token;
        PHASE(SETUP);
        Softmax softmax;
        const Query query(shared.queries[item_index % kItems]);
        for (int tile = first_tile; tile < tiles;) {
            const bool is_first = PROMOTE == 0 || tile == first_tile;
            const int end = PROMOTE == 0 ? tiles : min(tiles, tile + PROMOTE / TOKENS * kGroups);
            softmax.clear_accumulators();
            for (; tile < end; tile += kGroups)
                process_tile(softmax, query, item, length, first_position + tile * TILE TIMELINE_ARGUMENT);
            PHASE(REDUCE);
            // Waits until the item whose sums lay here has been combined; the first items have none before them. A warp
            // without a tile of an item need not wait: `ready` of a later item says that this phase is over.
            const int previous = item_index + kItems - SLOTS;
            ptxlab::mbarrier_wait(&control.cleared[previous % kItems], (previous / kItems + 1) % 2);
            softmax.promote(warp_sums, item_index, warp, is_first);
        }
    }

    // Sum up the warp's tiles of the block's items, in order, and combine each item kLag items later. At the record
    // without tiles, which is the last, combine the items that are left.
    __device__ __forceinline__ void run(const Combiner& combiner TIMELINE_PARAMETER) {
        int combined = 0;
        for (int item_index = 0;; ++item_index) {
            const int slot = item_index % kItems;
            PHASE(WAIT_GROUP);
            ptxlab::mbarrier_wait(&control.ready[slot], item_index / kItems % 2);
            const WorkItem& item = control.items[slot];
            const int tiles = item.tiles, first_tile = tiles > 0 ? (group - item.first_group + kGroups) % kGroups : 0;
            if (first_tile < tiles) process_item(item_index, item, tiles, first_tile TIMELINE_ARGUMENT);
            if (tiles > 0) ptxlab::mbarrier_arrive(&control.summed[slot]);
            for (const int last = tiles > 0 ? item_index - kLag : item_index - 1; combined <= last; ++combined)
                combiner.combine_item(combined TIMELINE_ARGUMENT);
            if (tiles == 0) break;
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT) attention_kv4_sm90(
    const unsigned short* q,                    // f16 or bf16 [B, T, Hq, D]
    const unsigned char* pool,                  // u8 [pages, 2, Hkv, PAGE_BYTES]
    const int* table,                           // s32 [B, P]
    const int* lengths,                         // s32 [B]
    const float* k_scale, const float* k_zero,  // f32 [Hkv, D] if CHANNEL, else null
    const float* v_scale, const float* v_zero,
    unsigned short* out,  // f16 or bf16 [B, T, Hq, D]
    float* lse,           // f32 [B, T, Hq], or null
    // u32 [gridDim.x, columns, D]: sums of 2^(score - largest) * value that a block hands over
    u32* partial,
    // u32 [gridDim.x, columns, 2]: their largest score, sum of 2^(..); both 0 before and after
    u32* stats, float softmax_scale, int B, int T, int Hq, int Hkv, int P, int window) {
    extern __shared__ __align__(128) unsigned char memory[];  // SharedMemory, WarpSums
    __shared__ Control control;
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    TIMELINE_THREAD(threadIdx.x % 32 == 0);
    const int first_length = warp >= WARPS ? Segments::first_length_of(lengths, B) : 0;
    const Arguments arguments = {q,       pool,  table,         lengths, k_scale, k_zero, v_scale, v_zero, out,   lse,
                                 partial, stats, softmax_scale, B,       T,       Hq,     Hkv,     P,      window};
    Segments segment;
    if (warp >= WARPS) segment = Segments(lengths, first_length, B, Hkv * arguments.splits, T, window);
    else if (ptxlab::elect()) control.init(warp);
    __syncthreads();
    ptxlab::launch_dependents();
    if (warp == kProducerWarp) {
        PageProducer(segment, arguments).run(shared, control TIMELINE_ARGUMENT);
    } else if (warp >= kQueryWarp) {
        QueryQuantiser(segment, arguments).run(shared, control TIMELINE_ARGUMENT);
    } else {
        const WarpSums warp_sums(shared, arguments.columns);
        const Combiner combiner = {arguments, control, warp_sums, warp};
        Consumer consumer = {arguments, shared, control, warp_sums, warp};
        consumer.run(combiner TIMELINE_ARGUMENT);
    }
}
