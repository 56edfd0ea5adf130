#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
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

// What a unit costs for each of its rows before its first token, as a number of tokens: queries and results are
// converted.
constexpr double kUnitTokens = 16;
// What a partial result costs for each query, likewise: it is as large as a token of 16 bits. Its lines are fetched,
// written, and read again, mostly from the cache of another core, which takes twice as long.
constexpr double kPartialTokens = 4;
// A shared run is cut only where each piece is so many times the work that cutting costs.
constexpr double kCutWorth = 2;

// How much work each item gets. Whoever is free takes the next item, so items could be small; but every cut leaves
// partial results to be merged. So items come in rounds of one per worker: most of what is left, then most of the rest,
// until the rest is little and is divided evenly. In the time that all of it takes, even a worker of 0.6 times the
// others' speed is through with its item of the first round.
class Portions {
 public:
  // `work` and `last_round` (of one worker) in tokens x KV heads.
  Portions(double work, int workers, double last_round) : left_(work), workers_(workers), last_round_(last_round) {}

  double next() {
    if (in_round_ == 0) {
      const double share = left_ / workers_;
      last_ = share <= last_round_;
      size_ = kRound * share;
      in_round_ = workers_;
    }
    const int still = in_round_--;
    if (workers_ == 1 || (last_ && still == 1)) return std::numeric_limits<double>::infinity();
    return last_ ? left_ / still : size_;
  }
  void took(double work) { left_ -= work; }

 private:
  static constexpr double kRound = 0.6;

  double left_;
  const int workers_;
  const double last_round_;
  int in_round_ = 0;
  bool last_ = false;
  double size_ = 0;
};

// Where a piece of the run [from, end) should end if `fits` tokens of it fit the item, at a boundary of tiles or, if
// that is too coarse, of the blocks of 16 tokens that kernels work in. No piece and no rest shorter than `least`,
// except that something fits an item that is `fresh`. `from`: nothing does.
int piece_end(int from, int end, double fits, int least, bool fresh) {
  const int grid = fits < 16 * kTile ? 16 : kTile;
  if (end - from <= fits + grid / 2) return end;
  const std::int64_t wanted = std::max<std::int64_t>(std::llround((from + fits) / grid) * grid, from);
  if (wanted - from < least) {
    if (!fresh) return from;
    return static_cast<int>(end - from < 2LL * least ? end : (from + least + grid - 1LL) / grid * grid);
  }
  if (end - wanted >= least) return static_cast<int>(wanted);
  const int before = (end - least) / grid * grid;
  return wanted - before > end - wanted || before - from < least ? end : before;
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

  // What there is to do, in tokens x KV heads: reading dominates up to some number of queries, arithmetic after that.
  const bool sixteen_bits = layout.type == Type::bf16 && !pool_.slots;
  const double balanced = sixteen_bits ? kernels_->balanced_queries : KernelTable().balanced_queries;
  auto per_token = [&](double rows) { return std::max(1.0, rows * heads_ / balanced); };
  double work = 0;
  for (const GroupWork& group : group_work) {
    const double rows = static_cast<double>(group.rows.size());
    work += rows * kUnitTokens + (group.end - group.begin) * per_token(rows);
  }
  for (int row = 0; row < rows_; ++row)
    for (const Run& run : own[row]) work += kUnitTokens + run.end - run.begin;
  work *= pool_.kv_heads;
  const int useful =
      static_cast<int>(std::min<double>(in.threads, std::max(1.0, work / std::max(1, in.tuning.min_thread_tokens))));

  Portions portions(work, useful, in.tuning.last_round_tokens);
  double room = portions.next();
  bundles_.push_back(0);
  auto end_item = [&] {
    bundles_.push_back(static_cast<int>(units_.size()));
    room = portions.next();
  };
  // Cuts a run of one head for `rows` rows where items end, no shorter than `least`; add(begin, end) makes a unit.
  auto cut = [&](Run run, int rows, int least, auto&& add) {
    const double fixed = rows * kUnitTokens, each = per_token(rows);
    int from = run.begin;
    do {
      const bool fresh = static_cast<int>(units_.size()) == bundles_.back();
      const int stop = piece_end(from, run.end, (room - fixed) / each, least, fresh);
      const double cost = (stop - from) * each + (stop == run.end ? fixed : 0.0);
      if (stop > from || run.begin == run.end) {  // else what the item has left is too little for a piece
        add(from, stop);
        room -= fixed;
      }
      room -= cost;
      portions.took(cost);
      from = stop;
      if (stop < run.end || room < kUnitTokens) end_item();
    } while (from < run.end);
  };

  // Groups first: they are the longest items. A group is read once for as many rows as it is cut into parts: few parts
  // mean large partial results wherever an item ends, many that an item reads more tokens for the same work. Together
  // they cost least where, for an item as large as the first, both are as dear.
  const int least_tokens = std::max(1, in.tuning.min_split_tokens);
  const double first_item = room;
  for (const GroupWork& group : group_work) {
    const int count = static_cast<int>(group.rows.size()), rows_at = static_cast<int>(unit_rows_.size());
    unit_rows_.insert(unit_rows_.end(), group.rows.begin(), group.rows.end());
    const double partial = heads_ * kPartialTokens;  // of a row
    const int most = kMaxPasses * pass_rows(heads_);
    const double best = std::sqrt(first_item * count / (per_token(count) * partial));
    const int together = static_cast<int>(std::min<double>(most, std::max<double>(best, pass_rows(heads_))));
    const int parts = (count + together - 1) / together;
    for (int head = 0; head < pool_.kv_heads; ++head)
      for (int part = 0; part < parts; ++part) {
        const int first = static_cast<int>(static_cast<std::int64_t>(count) * part / parts);
        const int rows = static_cast<int>(static_cast<std::int64_t>(count) * (part + 1) / parts) - first;
        const double dear = kCutWorth * rows * (kUnitTokens + partial) / per_token(rows);
        cut({group.begin, group.end}, rows, std::max(least_tokens, static_cast<int>(dear)), [&](int begin, int end) {
          units_.push_back({table_begin_[group.rows[0]], begin, end, head, rows_at + first, rows});
        });
      }
  }
  for (int row = 0; row < rows_; ++row) {
    const int rows_at = static_cast<int>(unit_rows_.size());
    unit_rows_.push_back(row);
    for (int head = 0; head < pool_.kv_heads; ++head)
      for (const Run& run : own[row])
        cut(run, 1, least_tokens, [&](int begin, int end) {
          units_.push_back({table_begin_[row], begin, end, head, rows_at, 1, -1, end == lengths_[row] && end > 0});
        });
  }
  if (static_cast<int>(units_.size()) > bundles_.back()) bundles_.push_back(static_cast<int>(units_.size()));

  // Where pieces of groups end is no longer a matter of rounds alone, so put the longest items first.
  if (!group_work.empty()) {
    std::vector<std::pair<double, int>> order;
    for (int item = 0; item < items(); ++item) {
      double cost = 0;
      for (int u = bundles_[item]; u < bundles_[item + 1]; ++u)
        cost += units_[u].row_count * kUnitTokens + (units_[u].end - units_[u].begin) * per_token(units_[u].row_count);
      order.emplace_back(-cost, item);
    }
    std::sort(order.begin(), order.end());
    std::vector<Unit> units;
    std::vector<int> bundles = {0};
    for (const auto& [cost, item] : order) {
      units.insert(units.end(), units_.begin() + bundles_[item], units_.begin() + bundles_[item + 1]);
      bundles.push_back(static_cast<int>(units.size()));
    }
    units_.swap(units);
    bundles_.swap(bundles);
  }

  // A unit that is not the only one of its row and head leaves a partial result for each of its rows.
  const int targets = rows_ * pool_.kv_heads;
  auto target = [&](const Unit& unit, int i) { return unit_rows_[unit.rows + i] * pool_.kv_heads + unit.head; };
  parts_begin_.assign(targets + 1, 0);
  for (const Unit& unit : units_) {
    max_rows_ = std::max(max_rows_, unit.row_count);
    for (int i = 0; i < unit.row_count; ++i) ++parts_begin_[target(unit, i) + 1];
  }
  for (int i = 0; i < targets; ++i) parts_begin_[i + 1] += parts_begin_[i];
  parts_.resize(parts_begin_[targets]);
  std::vector<int> at_part(parts_begin_.begin(), parts_begin_.end());
  for (Unit& unit : units_) {
    const int only = target(unit, 0);
    if (unit.row_count == 1 && parts_begin_[only + 1] - parts_begin_[only] == 1) continue;
    unit.partial = partials_;
    for (int i = 0; i < unit.row_count; ++i) parts_[at_part[target(unit, i)]++] = partials_++;
  }

  arrived_ = std::make_unique<std::atomic<int>[]>(std::max(1, targets));  // zeros
  const std::size_t dim = layout.head_dim;
  const std::size_t scratch = align64(scratch_bytes(max_rows_, heads_, layout.head_dim));
  const std::size_t worker_o = align64(heads_ * dim * sizeof(float));  // of the only unit of a row
  // Workers' parts begin a page apart plus a line, so that they neither share lines nor map to the same cache sets.
  const std::size_t per_worker = ((scratch + worker_o + 4095) & ~static_cast<std::size_t>(4095)) + 64;
  const std::size_t o_bytes = align64(static_cast<std::size_t>(partials_) * heads_ * dim * sizeof(float));
  const std::size_t l_bytes = align64(static_cast<std::size_t>(partials_) * heads_ * sizeof(float));
  memory_ = std::make_unique<Block>(per_worker * workers_ + 8192 + o_bytes + 2 * l_bytes);
  std::uint8_t* at = static_cast<std::uint8_t*>(memory_->data);
  for (int worker = 0; worker < workers_; ++worker, at += per_worker) {
    scratch_.push_back({at, nullptr});
    worker_o_.push_back(reinterpret_cast<float*>(at + scratch));
  }
  // Whatever the number of workers, sums begin half a row after a page boundary: a row of them is as large as a pair of
  // 16-bit values, and loads of values wait for stores of sums that are the same distance from a page boundary.
  at += 4096 - (at - static_cast<std::uint8_t*>(memory_->data)) % 4096 + align64(dim * sizeof(float) / 2);
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

void Plan::run_item(const LayerIo& io, int item, int worker, NextItem* next) {
  const int end = bundles_[item + 1];
  const int dim = pool_.layout.head_dim;
  for (int u = bundles_[item]; u < end; ++u) {
    const Unit& unit = units_[u];
    Segment now = segment(io, unit, worker);
    struct Following {
      const Plan* plan;
      const LayerIo* io;
      int unit;  // -1: the first of the next item
      int worker;
      NextItem* next;
      Segment segment;
    } following{this, &io, u + 1 < end ? u + 1 : -1, worker, next, {}};
    const auto find = [](void* context) -> const Segment* {
      Following& f = *static_cast<Following*>(context);
      if (f.unit < 0) {
        const int item = f.next->get();
        if (item < 0) return nullptr;
        f.unit = f.plan->bundles_[item];
      }
      f.segment = f.plan->segment(*f.io, f.plan->units_[f.unit], f.worker);
      return &f.segment;
    };
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
    kernels_->attend(shape_, now, {find, &following}, scratch_[worker]);
    if (unit.partial < 0) {
      finish_row(io, unit_rows_[unit.rows], unit.head, now.o, m, l);
      continue;
    }
    for (int i = 0; i < unit.row_count; ++i) {
      const int row = unit_rows_[unit.rows + i];
      const int target = row * pool_.kv_heads + unit.head;
      const int begin = parts_begin_[target], parts = parts_begin_[target + 1] - begin;
      std::atomic<int>& arrived = arrived_[target];
      if (arrived.fetch_add(1, std::memory_order_acq_rel) != parts - 1) continue;
      arrived.store(0, std::memory_order_relaxed);
      float *o[kMergedParts], *pm[kMergedParts], *pl[kMergedParts];
      auto put = [&](int to, int part) {
        const std::int64_t at = static_cast<std::int64_t>(parts_[begin + part]) * heads_;
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
  struct Items {
    std::atomic<int> taken{0};
    int count;
  } all{{}, items()};
  const NextItem::Take take = [](void* context) {
    Items& all = *static_cast<Items*>(context);
    const int item = all.taken.fetch_add(1, std::memory_order_relaxed);
    return item < all.count ? item : -1;
  };
  auto work = [&](int worker) {
    for (int item = take(&all); item >= 0;) {
      NextItem following(take, &all);
      run_item(io, item, worker, &following);
      item = following.get();
    }
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
