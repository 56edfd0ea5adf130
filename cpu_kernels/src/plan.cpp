#include "plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "append.hpp"

namespace cpu_kernels {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string row_name(int row) { return "row " + std::to_string(row) + ": "; }

int round_up(std::int64_t n, int to) { return static_cast<int>((n + to - 1) / to * to); }

// A few freed blocks are kept, because a plan is made for every step and fresh memory costs page faults.
struct BlockCache {
  static constexpr std::size_t kKept = 4;
  std::mutex mutex;
  std::vector<std::pair<std::size_t, void*>> blocks;

  void* take(std::size_t bytes, std::size_t* capacity) {
    std::lock_guard<std::mutex> lock(mutex);
    for (std::size_t i = 0; i < blocks.size(); ++i)
      if (blocks[i].first >= bytes && blocks[i].first <= 4 * bytes) {
        *capacity = blocks[i].first;
        void* block = blocks[i].second;
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(i));
        return block;
      }
    return nullptr;
  }
  void give(std::size_t bytes, void* block) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      blocks.emplace_back(bytes, block);
      if (blocks.size() <= kKept) return;
      block = blocks.front().second;
      blocks.erase(blocks.begin());
    }
    std::free(block);
  }
};

BlockCache& block_cache() {
  static BlockCache* cache = new BlockCache;  // never destroyed: plans may outlive static objects
  return *cache;
}

}  // namespace

struct Plan::Block {
  std::size_t bytes = 0;
  void* data = nullptr;

  explicit Block(std::size_t wanted) {
    data = block_cache().take(wanted, &bytes);
    if (data != nullptr) return;
    bytes = (wanted + 4095) & ~static_cast<std::size_t>(4095);
    data = std::aligned_alloc(4096, bytes);
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Block() { block_cache().give(bytes, data); }
};

Plan::~Plan() = default;

Plan::Plan(const PlanInput& in)
    : pool_(*in.pool), kernels_(in.kernels), rows_(in.rows), q_heads_(in.q_heads), workers_(in.threads) {
  const PageLayout& layout = pool_.layout;
  if (in.rows < 0) refuse("the number of rows must not be negative");
  if (in.threads < 1) refuse("threads must be at least 1");
  if (in.q_heads < 1 || in.q_heads % pool_.kv_heads != 0)
    refuse("the number of query heads must be a multiple of the " + std::to_string(pool_.kv_heads) + " KV heads");
  heads_ = in.q_heads / pool_.kv_heads;
  if (heads_ > 16) refuse("at most 16 query heads per KV head");
  if (in.query_type == Type::i8) refuse("queries and outputs cannot be int8");
  if (in.window < 0) refuse("window must not be negative");
  shape_.layout = layout;
  shape_.slots = pool_.slots;
  shape_.query_type = in.query_type;
  shape_.scale = in.scale;
  shape_.soft_cap = in.soft_cap;
  shape_.tuning = in.tuning;

  lengths_.assign(in.lengths, in.lengths + rows_);
  table_begin_.assign(in.table_begin, in.table_begin + rows_ + 1);
  table_.assign(in.table, in.table + table_begin_[rows_]);
  const int per_id = pool_.slots ? 1 : layout.page_tokens;
  const char* ids = pool_.slots ? "slot" : "page";
  std::vector<int> first(rows_);
  for (int row = 0; row < rows_; ++row) {
    const int length = lengths_[row];
    if (length < 0) refuse(row_name(row) + "negative length");
    first[row] = in.window > 0 && length > in.window ? length - in.window : 0;
    const std::int64_t begin = table_begin_[row], needed = (static_cast<std::int64_t>(length) + per_id - 1) / per_id;
    if (table_begin_[row + 1] - begin < needed)
      refuse(row_name(row) + std::to_string(length) + " tokens need " + std::to_string(needed) + " " + ids +
             " ids, the table has " + std::to_string(table_begin_[row + 1] - begin));
    for (std::int64_t i = first[row] / per_id; i < needed; ++i)
      if (table_[begin + i] < 0 || table_[begin + i] >= pool_.pages)
        refuse(row_name(row) + ids + " id " + std::to_string(table_[begin + i]) + " is outside the pool of " +
               std::to_string(pool_.pages));
  }

  // Which runs of tokens are read for a group, and which each row reads by itself.
  struct Run {
    int begin, end;
  };
  std::vector<std::vector<Run>> shared(in.group_count > 0 ? rows_ : 0);
  struct GroupWork {
    int begin, end;
    std::vector<int> rows;
  };
  std::vector<GroupWork> group_work;
  for (int g = 0; g < in.group_count; ++g) {
    const PrefixGroup& group = in.groups[g];
    const std::string name = "prefix group " + std::to_string(g) + ": ";
    if (group.begin < 0 || group.end < group.begin) refuse(name + "bad token range");
    if (group.begin % per_id != 0) refuse(name + "must begin at a page");
    GroupWork work{group.begin, group.end, {}};
    int leader = -1;
    for (int i = group.row_begin; i < group.row_end; ++i) {
      const int row = in.group_rows[i];
      if (row < 0 || row >= rows_) refuse(name + "row " + std::to_string(row) + " is not in the batch");
      if (lengths_[row] < group.end) refuse(name + row_name(row) + "shorter than the shared run");
      if (leader < 0) leader = row;
      const std::int32_t* a = table_.data() + table_begin_[leader];
      const std::int32_t* b = table_.data() + table_begin_[row];
      if (!std::equal(a + group.begin / per_id, a + (group.end + per_id - 1) / per_id, b + group.begin / per_id))
        refuse(name + row_name(row) + "its " + ids + " ids differ from those of row " + std::to_string(leader));
      if (first[row] <= group.begin) work.rows.push_back(row);  // others see only a part of the run: by themselves
    }
    std::vector<int> sorted = work.rows;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) refuse(name + "a row is listed twice");
    if (static_cast<int>(work.rows.size()) < std::max(2, in.tuning.prefix_min_rows) || group.begin == group.end)
      continue;
    for (int row : work.rows) shared[row].push_back({group.begin, group.end});
    group_work.push_back(std::move(work));
  }

  // Which runs each row reads by itself.
  std::vector<std::vector<Run>> own(rows_);
  for (int row = 0; row < rows_; ++row) {
    const int length = lengths_[row];
    if (length == 0) can_append_ = false;
    int at = first[row];
    if (!shared.empty()) {
      auto& runs = shared[row];
      std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
      for (const Run& run : runs) {
        if (run.begin < at) refuse(row_name(row) + "its prefix groups overlap");
        if (run.begin > at) own[row].push_back({at, run.begin});
        at = run.end;
      }
      if (at == length) can_append_ = false;
      if (!runs.empty() && at == length) continue;
    }
    if (at < length || length == 0) own[row].push_back({at, length});
  }

  // What a unit costs before its first token, as a number of tokens: queries and results are converted.
  constexpr int kUnitTokens = 16;

  // The work, in tokens x KV heads, and what is left of it to be cut. Of a group, reading dominates up to about 16
  // queries, arithmetic after that.
  const int block_rows = std::max(1, kMaxQueries / heads_);
  auto blocks_of = [&](const GroupWork& group) {
    return (static_cast<int>(group.rows.size()) + block_rows - 1) / block_rows;
  };
  auto weight = [&](int queries) { return std::max(1.0, queries / 16.0); };
  double left = 0;
  for (const GroupWork& group : group_work) {
    const double blocks = blocks_of(group);
    left += (group.end - group.begin) * blocks * weight(static_cast<int>(group.rows.size() / blocks) * heads_);
  }
  for (int row = 0; row < rows_; ++row)
    for (const Run& run : own[row]) left += run.end - run.begin + kUnitTokens;
  left *= pool_.kv_heads;

  // Cuts a run into pieces that end at tile boundaries. No piece of a head is more than its thread's share of what is
  // left, divided by splits_per_thread: whole rows while there is much, ever shorter pieces towards the end, so that
  // the threads end together although they are not equally fast. Nor is any longer than `longest`.
  constexpr double kAnyLength = 1e9;
  auto cut = [&](Run run, double token_weight, double longest, auto&& add) {
    int from = run.begin;
    do {
      const double share = left / (static_cast<double>(in.threads) * std::max(1, in.tuning.splits_per_thread));
      const double even = std::max<double>(share / token_weight, std::max(1, in.tuning.min_split_tokens));
      const double most = in.threads > 1 ? std::min(even, longest) : longest;
      const int tile = from / kTile * kTile;
      int to = run.end;
      // A rest that is shorter than half a piece goes with it.
      if ((run.end - tile) > 1.5 * most) to = static_cast<int>(tile + round_up(static_cast<std::int64_t>(most), kTile));
      to = std::min(to, run.end);
      add(from, to);
      left -= (to - from) * token_weight * pool_.kv_heads;
      from = to;
    } while (from < run.end);
  };

  // Groups first: they are the longest items. One pass over a run serves a block of rows; where it takes several, they
  // follow each other head by head and in pieces, so that all but the first find keys and values in the core's cache.
  const double piece_tokens =
      std::max<double>(kTile, in.tuning.prefix_piece_kib * 1024.0 / (2.0 * static_cast<double>(layout.row_bytes())));
  struct QueryBlock {
    int rows_at, count, partial;
  };
  std::vector<std::vector<Parts>> row_parts(rows_);
  std::vector<double> cost;
  for (const GroupWork& group : group_work) {
    const int count = static_cast<int>(group.rows.size()), blocks = blocks_of(group);
    const double longest = blocks > 1 ? piece_tokens : kAnyLength;
    cut({group.begin, group.end}, blocks * weight(count / blocks * heads_), longest, [&](int begin, int end) {
      std::vector<QueryBlock> parts;
      for (int block = 0; block < blocks; ++block) {
        const int from = static_cast<int>(static_cast<std::int64_t>(count) * block / blocks);
        const int to = static_cast<int>(static_cast<std::int64_t>(count) * (block + 1) / blocks);
        parts.push_back({static_cast<int>(unit_rows_.size()), to - from, partials_});
        unit_rows_.insert(unit_rows_.end(), group.rows.begin() + from, group.rows.begin() + to);
        for (int i = from; i < to; ++i) row_parts[group.rows[i]].push_back({partials_ + (i - from), to - from});
        max_queries_ = std::max(max_queries_, (to - from) * heads_);
        partials_ += pool_.kv_heads * (to - from);
      }
      for (int head = 0; head < pool_.kv_heads; ++head)
        for (const QueryBlock& part : parts) {
          units_.push_back({table_begin_[group.rows[0]], begin, end, head, part.rows_at, part.count,
                            part.partial + head * part.count, false});
          cost.push_back((end - begin) * weight(part.count * heads_));
        }
    });
  }
  for (int row = 0; row < rows_; ++row) {
    const int rows_at = static_cast<int>(unit_rows_.size());
    unit_rows_.push_back(row);
    max_queries_ = std::max(max_queries_, heads_);
    std::vector<Run> pieces;
    for (const Run& run : own[row])
      cut(run, 1.0, kAnyLength, [&](int begin, int end) { pieces.push_back({begin, end}); });
    const bool alone = pieces.size() == 1 && row_parts[row].empty();
    for (const Run& piece : pieces) {
      const bool newest = piece.end == lengths_[row] && piece.end > 0;
      if (!alone) row_parts[row].push_back({partials_, 1});
      for (int head = 0; head < pool_.kv_heads; ++head) {
        units_.push_back(
            {table_begin_[row], piece.begin, piece.end, head, rows_at, 1, alone ? -1 : partials_ + head, newest});
        cost.push_back(piece.end - piece.begin + kUnitTokens);
      }
      if (!alone) partials_ += pool_.kv_heads;
    }
  }
  parts_begin_.assign(rows_ + 1, 0);
  for (int row = 0; row < rows_; ++row) {
    parts_.insert(parts_.end(), row_parts[row].begin(), row_parts[row].end());
    parts_begin_[row + 1] = static_cast<int>(parts_.size());
  }

  // Units are taken in bundles, so that a worker knows what comes next and can prefetch it: large bundles first, small
  // ones at the end, where they even out what the threads have left.
  left = 0;
  for (double c : cost) left += c;
  const double least = std::max(1, in.tuning.min_thread_tokens);
  const int useful = static_cast<int>(std::min<double>(in.threads, std::max(1.0, left / least)));
  bundles_.push_back(0);
  for (std::size_t i = 0; i < units_.size();) {
    const double target = useful == 1 ? left : std::max(left / (2.0 * useful), std::min(least, 256.0));
    double taken = 0;
    do taken += cost[i++];
    while (i < units_.size() && taken + cost[i] / 2 <= target);
    left -= taken;
    bundles_.push_back(static_cast<int>(i));
  }

  const int targets = rows_ * pool_.kv_heads;
  arrived_ = std::make_unique<std::atomic<int>[]>(std::max(1, targets));  // zeros
  const std::size_t dim = layout.head_dim;
  const std::size_t scratch = align64(scratch_bytes(std::max(1, max_queries_), layout.head_dim));
  const std::size_t worker_o = align64(std::max(1, max_queries_) * dim * sizeof(float));
  // Workers' parts begin a page apart plus a line, so that they neither share lines nor map to the same cache sets.
  const std::size_t per_worker = ((scratch + worker_o + 4095) & ~static_cast<std::size_t>(4095)) + 64;
  const std::size_t o_bytes = align64(static_cast<std::size_t>(partials_) * heads_ * dim * sizeof(float));
  const std::size_t l_bytes = align64(static_cast<std::size_t>(partials_) * heads_ * sizeof(float));
  memory_ = std::make_unique<Block>(per_worker * workers_ + o_bytes + 2 * l_bytes + 64);
  std::uint8_t* at = static_cast<std::uint8_t*>(memory_->data);
  for (int worker = 0; worker < workers_; ++worker, at += per_worker) {
    scratch_.push_back({at, nullptr});
    worker_o_.push_back(reinterpret_cast<float*>(at + scratch));
  }
  partial_o_ = reinterpret_cast<float*>(at);
  partial_m_ = reinterpret_cast<float*>(at + o_bytes);
  partial_l_ = reinterpret_cast<float*>(at + o_bytes + l_bytes);
}

void Plan::begin() {
  if (running_.exchange(true, std::memory_order_acq_rel))
    throw std::runtime_error("the plan is running: it has one workspace and runs one layer at a time");
  if (!cut_short_) return;
  for (int i = 0; i < rows_ * pool_.kv_heads; ++i) arrived_[i].store(0, std::memory_order_relaxed);
  cut_short_ = false;
}

void Plan::end(bool whole) {
  cut_short_ = !whole;
  running_.store(false, std::memory_order_release);
}

Segment Plan::segment(const LayerIo& io, const Unit& unit, int worker) const {
  Segment s;
  if (pool_.slots) {
    const std::int64_t row = static_cast<std::int64_t>(pool_.layout.row_bytes());
    s.k = pool_.k[io.layer] + unit.head * row;
    s.v = pool_.v[io.layer] + unit.head * row;
    s.k_stride = pool_.k_slot_bytes;
    s.v_stride = pool_.v_slot_bytes;
  } else {
    s.k = pool_.page(io.layer, 0, unit.head);
    s.v = s.k + pool_.layout.v_offset();
    s.k_stride = s.v_stride = static_cast<std::int64_t>(pool_.kv_heads * pool_.layout.page_bytes());
  }
  s.table = table_.data() + unit.table;
  s.begin = unit.begin;
  s.end = unit.end;
  s.query_base = io.q + static_cast<std::int64_t>(unit.head) * heads_ * pool_.layout.head_dim *
                            static_cast<std::int64_t>(type_bytes(shape_.query_type));
  s.query_rows = unit_rows_.data() + unit.rows;
  s.query_row_bytes = io.q_row_bytes;
  s.heads = heads_;
  s.queries = heads_ * unit.row_count;
  if (unit.partial >= 0) {
    const std::int64_t at = static_cast<std::int64_t>(unit.partial) * heads_;
    s.o = partial_o_ + at * pool_.layout.head_dim;
    s.m = partial_m_ + at;
    s.l = partial_l_ + at;
  } else {
    s.o = worker_o_[worker];
  }
  return s;
}

void Plan::finish_row(const LayerIo& io, int row, int head, float* o, float* m, float* l) {
  const std::int64_t at = static_cast<std::int64_t>(head) * heads_;
  kernels_->finish(o, m, l, heads_, pool_.layout.head_dim, shape_.query_type,
                   io.out + row * io.out_row_bytes +
                       at * pool_.layout.head_dim * static_cast<std::int64_t>(type_bytes(shape_.query_type)),
                   io.lse == nullptr ? nullptr : io.lse + row * io.lse_row + at);
}

void Plan::run_item(const LayerIo& io, int item, int worker) {
  const int end = bundles_[item + 1];
  const int dim = pool_.layout.head_dim;
  for (int u = bundles_[item]; u < end; ++u) {
    const Unit& unit = units_[u];
    Segment now = segment(io, unit, worker), next;
    if (u + 1 < end) next = segment(io, units_[u + 1], worker);
    if (unit.newest && io.k != nullptr) {
      const int row = unit_rows_[unit.rows], position = unit.end - 1;
      const std::int64_t head_bytes =
          static_cast<std::int64_t>(unit.head) * dim * static_cast<std::int64_t>(type_bytes(shape_.query_type));
      const std::int64_t id = now.table[pool_.slots ? position : position / pool_.layout.page_tokens];
      write_token(*kernels_, pool_, io.layer, id, pool_.slots ? 0 : position % pool_.layout.page_tokens, unit.head,
                  shape_.query_type, io.k + row * io.k_row_bytes + head_bytes,
                  io.v + row * io.v_row_bytes + head_bytes);
    }
    float m[16], l[16];
    if (unit.partial < 0) {
      now.m = m;
      now.l = l;
    }
    kernels_->attend(shape_, now, u + 1 < end ? &next : nullptr, scratch_[worker]);
    if (unit.partial < 0) {
      finish_row(io, unit_rows_[unit.rows], unit.head, now.o, m, l);
      continue;
    }
    for (int i = 0; i < unit.row_count; ++i) {
      const int row = unit_rows_[unit.rows + i];
      const int begin = parts_begin_[row], parts = parts_begin_[row + 1] - begin;
      std::atomic<int>& arrived = arrived_[row * pool_.kv_heads + unit.head];
      if (arrived.fetch_add(1, std::memory_order_acq_rel) != parts - 1) continue;
      arrived.store(0, std::memory_order_relaxed);
      float *o[kMergedParts], *pm[kMergedParts], *pl[kMergedParts];
      auto put = [&](int to, int part) {
        const Parts& p = parts_[begin + part];
        const std::int64_t at = static_cast<std::int64_t>(p.first + unit.head * p.per_head) * heads_;
        o[to] = partial_o_ + at * dim;
        pm[to] = partial_m_ + at;
        pl[to] = partial_l_ + at;
      };
      put(0, 0);
      for (int part = 1; part < parts;) {
        int count = 1;
        for (; count < kMergedParts && part < parts; ++count, ++part) put(count, part);
        kernels_->merge(o, pm, pl, count, heads_, dim);
      }
      finish_row(io, row, unit.head, o[0], pm[0], pl[0]);
    }
  }
}

WorkCost Plan::item_cost(int item) const {
  WorkCost cost;
  for (int u = bundles_[item]; u < bundles_[item + 1]; ++u) cost.tokens += units_[u].end - units_[u].begin;
  cost.bytes = cost.tokens * static_cast<std::int64_t>(
                                 2 * (pool_.layout.row_bytes() + (pool_.layout.type == Type::i8 ? sizeof(float) : 0)));
  return cost;
}

WorkCost Plan::total_cost() const {
  WorkCost total;
  for (int i = 0; i < items(); ++i) {
    const WorkCost cost = item_cost(i);
    total.bytes += cost.bytes;
    total.tokens += cost.tokens;
  }
  return total;
}

void Plan::run(const LayerIo& io, int threads) {
  begin();
  std::atomic<int> next{0};
  auto work = [&](int worker) {
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items();) run_item(io, item, worker);
  };
  threads = std::min({threads, workers_, items()});
  std::vector<std::thread> others;
  try {
    for (int worker = 1; worker < threads; ++worker) others.emplace_back(work, worker);
  } catch (const std::system_error&) {  // those that there are do it all
  }
  work(0);
  for (std::thread& thread : others) thread.join();
  end(true);
}

}  // namespace cpu_kernels
