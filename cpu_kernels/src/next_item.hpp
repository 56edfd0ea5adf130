// What joins items of work, which are taken by whoever is free, to prefetching, which has to know what comes next.
#pragma once

namespace cpu_kernels {

// The item of the same job that a worker runs after the one it is at. It is the worker's from the moment it is asked
// for, so ask when little of the present one is left, for others may be out of work by then.
class NextItem {
 public:
  using Take = int (*)(void* context);
  NextItem() = default;
  NextItem(Take take, void* context) : take_(take), context_(context) {}
  // Its index, -1: there is none. The same however often it is called.
  int get() {
    if (item_ == kUnasked) item_ = take_ != nullptr ? take_(context_) : -1;
    return item_;
  }

 private:
  static constexpr int kUnasked = -2;
  Take take_ = nullptr;
  void* context_ = nullptr;
  int item_ = kUnasked;
};

}  // namespace cpu_kernels
