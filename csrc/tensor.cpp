#include "tensor.h"

#include <stdexcept>

namespace nb = nanobind;

namespace oneloop {
namespace {

// --- DLPack 1.x ABI ---

struct DlTensor {
    void* data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
};

struct DlExchangeApi {
    uint32_t major, minor;
    DlExchangeApi* older;
    void* allocate;
    void* managed_from_object;
    void* object_from_managed;
    int (*view)(void* object, DlTensor* out);
    void* current_stream;
};

constexpr int32_t kCpu = 1;

const char* name_of(Type type) {
    switch (type) {
        case Type::kFloat32: return "float32";
        case Type::kBFloat16: return "bfloat16";
        case Type::kFloat16: return "float16";
        case Type::kUInt8: return "uint8";
        case Type::kInt8: return "int8";
        case Type::kInt32: return "int32";
        default: return "int64";
    }
}

// Exchange functions of a Python type, or null if it publishes none. Requires the GIL.
const DlExchangeApi* exchange_api(PyTypeObject* type) {
    static PyTypeObject* last_type = nullptr;  // kept alive by the reference taken below
    static const DlExchangeApi* last_api = nullptr;
    if (type == last_type) return last_api;
    const DlExchangeApi* api = nullptr;
    nb::object capsule = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
        api = static_cast<const DlExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        while (api && api->major > 1) api = api->older;
        if (api && !api->view) api = nullptr;
    }
    Py_INCREF(type);
    Py_XDECREF(last_type);
    last_type = type;
    last_api = api;
    return api;
}

}  // namespace

Tensor::Tensor(nb::handle object, const char* name) : name_(name) {
    DlTensor t;
    if (const DlExchangeApi* api = exchange_api(Py_TYPE(object.ptr()))) {
        if (api->view(object.ptr(), &t) != 0) throw nb::python_error();
    } else {
        if (!nb::hasattr(object, "__dlpack__")) throw nb::type_error((std::string(name) + " is not a tensor").c_str());
        keep_ = object.attr("__dlpack__")();
        // The unversioned managed tensor begins with its DLTensor.
        const void* managed = PyCapsule_GetPointer(keep_.ptr(), "dltensor");
        if (!managed) throw nb::python_error();
        t = *static_cast<const DlTensor*>(managed);
    }
    if (t.device_type != kCpu) throw nb::type_error((std::string(name) + " is not in CPU memory").c_str());
    if (t.ndim > kMaxRank) fail("has " + std::to_string(t.ndim) + " dimensions");
    const int kind = t.lanes == 1 ? t.code * 256 + t.bits : -1;
    switch (kind) {
        case 2 * 256 + 32: type_ = Type::kFloat32; break;
        case 4 * 256 + 16: type_ = Type::kBFloat16; break;
        case 2 * 256 + 16: type_ = Type::kFloat16; break;
        case 1 * 256 + 8: type_ = Type::kUInt8; break;
        case 0 * 256 + 8: type_ = Type::kInt8; break;
        case 0 * 256 + 32: type_ = Type::kInt32; break;
        case 0 * 256 + 64: type_ = Type::kInt64; break;
        default: throw nb::type_error((std::string(name) + " has an element type that no kernel reads").c_str());
    }
    data_ = static_cast<char*>(t.data) + t.byte_offset;
    rank_ = t.ndim;
    bool empty = false;
    for (int64_t d = 0; d < rank_; d++) empty |= (shape_[d] = t.shape[d]) == 0;
    // A dim of one element may carry any stride, and a tensor of none any at all (numpy's are zeros): make them the dense ones, so
    // that they never fail a check.
    int64_t dense = 1;
    for (int64_t d = rank_ - 1; d >= 0; d--) {
        strides_[d] = t.strides && shape_[d] != 1 && !empty ? t.strides[d] : dense;
        dense *= shape_[d];
    }
}

void Tensor::fail(const std::string& what) const { throw std::invalid_argument(std::string(name_) + " " + what); }

const Tensor& Tensor::shaped(std::initializer_list<int64_t> sizes) const {
    bool same = static_cast<int64_t>(sizes.size()) == rank_;
    int64_t d = 0;
    for (auto size = sizes.begin(); same && size != sizes.end(); ++size, ++d) same = *size == -1 || *size == shape_[d];
    if (same) return *this;
    std::string want, have;
    for (int64_t size : sizes) want += (want.empty() ? "" : ", ") + (size == -1 ? "any" : std::to_string(size));
    for (int64_t i = 0; i < rank_; i++) have += (have.empty() ? "" : ", ") + std::to_string(shape_[i]);
    fail("has shape [" + have + "], expected [" + want + "]");
}

const Tensor& Tensor::typed(Type type) const {
    if (type_ != type) throw nb::type_error((std::string(name_) + " is " + name_of(type_) + ", expected " + name_of(type)).c_str());
    return *this;
}

const Tensor& Tensor::row_contiguous() const {
    if (rank_ > 0 && shape_[rank_ - 1] > 1 && strides_[rank_ - 1] != 1) fail("has gaps inside its rows");
    return *this;
}

const Tensor& Tensor::contiguous() const {
    int64_t dense = 1;
    for (int64_t d = rank_ - 1; d >= 0; d--) {
        if (shape_[d] != 1 && strides_[d] != dense) fail("is not contiguous");
        dense *= shape_[d];
    }
    return *this;
}

}  // namespace oneloop
