// A plan says, once per step, which worker reads which tokens; it is then run for every layer of the step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.hpp"
#include "next_item.hpp"

namespace cpu_kernels {

// Rows [row_begin, row_end) of PlanInput::group_rows share the page (slot) ids of their tokens [begin, end).
struct PrefixGroup {
  int begin = 0, end = 0;
  int row_begin = 0, row_end = 0;
};

struct PlanInput {
  const KvPool* pool = nullptr;
  int rows = 0;
  const std::int32_t* lengths = nullptr;      // [rows], tokens to attend to, the new one included
  const std::int32_t* table = nullptr;        // page ids (slot ids) of all rows, one row after the other
  const std::int64_t* table_begin = nullptr;  // [rows + 1], where each row's ids begin
  int q_heads = 0;
  Type query_type = Type::f32;
  float scale = 1.f;
  float soft_cap = 0.f;
  int window = 0;  // 0: all tokens, else only the last `window` of each row
  int threads = 1;
  const PrefixGroup* groups = nullptr;
  int group_count = 0;
  const std::int32_t* group_rows = nullptr;
  const KernelTable* kernels = nullptr;
  Tuning tuning;
};

// Where one layer's queries come from and its results go. Queries and outputs: [row][q_head][head_dim] in the plan's
// query type, heads contiguous. lse (optional): [row][q_head] fp32, natural logarithm. k, v (optional): the new token
// of every row, [row][kv_head][head_dim] in the query type, written to the pool at position length - 1 before it is
// read.
struct LayerIo {
  int layer = 0;
  const std::uint8_t* q = nullptr;
  std::int64_t q_row_bytes = 0;
  std::uint8_t* out = nullptr;
  std::int64_t out_row_bytes = 0;
  float* lse = nullptr;
  std::int64_t lse_row = 0;  // elements
  const std::uint8_t* k = nullptr;
  const std::uint8_t* v = nullptr;
  std::int64_t k_row_bytes = 0, v_row_bytes = 0;
};

struct WorkCost {
  std::int64_t bytes = 0;   // of keys and values read
  std::int64_t tokens = 0;  // tokens x KV heads
};

class Plan {
 public:
  // Copies what it needs of the input (the pool's memory must outlive the plan). Throws std::invalid_argument, naming
  // the row, for a length, table or group that does not fit the pool.
  explicit Plan(const PlanInput& input);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // How many items the work is cut into. Items may run in any order, at the same time, on any thread; `worker` <
  // workers() names the scratch memory, no two running items may share it. Whoever is last at a (row, head)
  // merges its partial results and writes the output. `next` is asked for when little of the item is left.
  int items() const { return static_cast<int>(bundles_.size()) - 1; }
  int workers() const { return workers_; }
  void run_item(const LayerIo& io, int item, int worker, NextItem* next);

  // A run of one layer is begin(), every item once, end(true); or, if it is cut short, end(false) when none of its
  // items runs any more. The workspace belongs to the run between the two: begin() throws std::runtime_error if there
  // is another one, and clears what one that was cut short has left.
  void begin();
  void end(bool whole);

  WorkCost item_cost(int item) const;
  // Runs of tokens of one KV head that the item reads, for so many rows each; a run costs something before its first
  // token.
  int item_units(int item) const { return bundles_[item + 1] - bundles_[item]; }
  int unit_rows(int item, int unit) const { return units_[bundles_[item] + unit].row_count; }
  int unit_tokens(int item, int unit) const {
    return units_[bundles_[item] + unit].end - units_[bundles_[item] + unit].begin;
  }
  WorkCost total_cost() const;

  // A whole run, on this thread and `threads` - 1 more that live for this call. For measurements and scripts; a step
  // uses a pool of persistent workers.
  void run(const LayerIo& io, int threads);

  bool can_append() const { return can_append_; }
  int units() const { return static_cast<int>(units_.size()); }
  int partials() const { return partials_; }
  const KernelTable& kernels() const { return *kernels_; }
  // Which kernels have in fact run on `worker`, or null.
  const char* ran(int worker) const { return scratch_[worker].ran; }

 private:
  // Tokens [begin, end) of one KV head for one row or for several that share them.
  struct Unit {
    std::int64_t table = 0;  // index of the ids of the row they are taken from
    int begin = 0, end = 0;
    int head = 0;
    int rows = 0;  // index in unit_rows_
    int row_count = 0;
    int partial = -1;     // first of row_count partial results, or -1: the only part of its row
    bool newest = false;  // holds the row's last token
  };

  Segment segment(const LayerIo& io, const Unit& unit, int worker) const;
  void finish_row(const LayerIo& io, int row, int head, float* o, float* m, float* l);

  KvPool pool_;
  AttendShape shape_;
  const KernelTable* kernels_;
  int rows_, q_heads_, heads_;  // heads_: query heads per KV head
  int workers_;
  bool can_append_ = true;
  std::vector<std::int32_t> lengths_, table_;
  std::vector<std::int64_t> table_begin_;
  std::vector<Unit> units_;
  std::vector<std::int32_t> unit_rows_;
  std::vector<int> bundles_;      // item i is units [bundles_[i], bundles_[i + 1])
  std::vector<int> parts_;        // partial results, of one row and head after the other
  std::vector<int> parts_begin_;  // [rows * kv_heads + 1]
  int partials_ = 0;
  int max_rows_ = 1;                             // of a unit
  std::unique_ptr<std::atomic<int>[]> arrived_;  // [row][kv_head], all 0 between whole runs
  std::atomic<bool> running_{false};
  bool cut_short_ = false;  // of the run before; whoever has set running_ owns it

  struct Block;  // aligned memory, reused from plan to plan
  std::unique_ptr<Block> memory_;
  std::vector<Scratch> scratch_;
  std::vector<float*> worker_o_;
  float *partial_o_ = nullptr, *partial_m_ = nullptr, *partial_l_ = nullptr;
};

}  // namespace cpu_kernels
