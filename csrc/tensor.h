// Tensors of Python calls: a kernel's view of a Python tensor, and every check that keeps memory safe.
//
// torch (2.10 and later) publishes a C function that fills a DLTensor from its tensor object without a Python call or a capsule.
// It takes 50 ns; __dlpack__ and nb::ndarray take 2.8 us, too slow for three hundred calls a step. Other libraries are read by
// __dlpack__. The layouts below are DLPack 1.x's stable ABI, so one build serves every torch.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace oneloop {

enum class Type { kFloat32, kBFloat16, kFloat16, kUInt8, kInt8, kInt32, kInt64 };

// View of a CPU tensor, valid during the call that created it. Strides count elements.
class Tensor {
public:
    // Throws TypeError unless `object` is a tensor in CPU memory. `name`: its name in errors.
    Tensor(nanobind::handle object, const char* name);

    int64_t rank() const { return rank_; }
    int64_t size(int64_t dim) const { return shape_[dim]; }
    int64_t stride(int64_t dim) const { return strides_[dim]; }
    Type type() const { return type_; }

    // Each throws ValueError, or TypeError for the element type, naming the tensor and what was expected.
    // A size of -1 accepts any.
    const Tensor& shaped(std::initializer_list<int64_t> sizes) const;
    const Tensor& typed(Type type) const;
    const Tensor& row_contiguous() const;  // the last dim has stride 1
    const Tensor& contiguous() const;

    template <typename T>
    T* data() const {
        return static_cast<T*>(data_);
    }

    [[noreturn]] void fail(const std::string& what) const;

private:
    static constexpr int kMaxRank = 8;

    const char* name_;
    void* data_;
    int64_t rank_;
    Type type_;
    int64_t shape_[kMaxRank], strides_[kMaxRank];
    nanobind::object keep_;  // capsule of the slow path
};

}  // namespace oneloop
