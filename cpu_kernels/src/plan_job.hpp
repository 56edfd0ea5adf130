// One layer's run of a plan in the form that a worker pool takes.
#pragma once

#include "plan.hpp"
#include "worker_pool.hpp"

namespace cpu_kernels {

struct PlanRun {
  Plan* plan = nullptr;
  LayerIo io;
  Job job;

  // The job refers to this object, which must stay where it is until the job has ended.
  void make_job() {
    job.items = plan->items();
    job.workers = plan->workers();
    job.context = this;
    job.run = [](void* context, int item, int worker, NextItem* next) {
      const PlanRun& self = *static_cast<PlanRun*>(context);
      self.plan->run_item(self.io, item, worker, next);
    };
    job.cost = [](void* context, int item, ItemCost* out) {
      const WorkCost cost = static_cast<PlanRun*>(context)->plan->item_cost(item);
      out->bytes = cost.bytes;
      out->tokens = cost.tokens;
    };
    job.begin = [](void* context) { static_cast<PlanRun*>(context)->plan->begin(); };
    job.end = [](void* context, JobResult result) {
      static_cast<PlanRun*>(context)->plan->end(result == JobResult::kDone);
    };
  }
};

}  // namespace cpu_kernels
