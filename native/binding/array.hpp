// Tensors as raw spans: what the kernels need of a torch tensor, asked for by name, so that no torch header is needed.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string>

#include "../job.hpp"

namespace kvbits {

namespace nb = nanobind;

// torch.float32 and so on, in the order of Type; set once by the Python side.
inline PyObject* dtypes[16] = {};

inline const char* name_of(Type type) {
    static const char* names[] = {"none", "float32", "bfloat16", "float16", "uint8", "int64", "bool", "uint16", "int32"};
    return names[int(type)];
}

// The memory of a CPU tensor of one of `types`, and which of them it is.
inline uint8_t* memory_of(nb::handle tensor, const char* what, std::initializer_list<Type> types, Type& found) {
    const nb::object dtype = nb::getattr(tensor, "dtype", nb::none());
    if (dtype.is_none()) throw nb::type_error((std::string(what) + " is not a tensor").c_str());
    for (const Type type : types)
        if (dtypes[int(type)] == dtype.ptr()) found = type;
    if (found == Type::none) {
        std::string message = std::string(what) + " is " + nb::str(dtype).c_str() + "; allowed are";
        for (const Type type : types) message += std::string(" ") + name_of(type);
        throw nb::value_error(message.c_str());
    }
    if (!nb::cast<bool>(tensor.attr("is_cpu"))) throw nb::value_error((std::string(what) + " is not on the CPU").c_str());
    auto* data = reinterpret_cast<uint8_t*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")()));
    if (reinterpret_cast<uintptr_t>(data) % uintptr_t(size_of(found)))
        throw nb::value_error((std::string(what) + " is not aligned to its elements").c_str());
    return data;
}

// The memory of `tensor`, which must be None (where allowed) or a CPU tensor of one of `types` with `dims` dimensions,
// elements next to each other in the last.
inline Array array_of(nb::handle tensor, const char* what, int dims, std::initializer_list<Type> types, bool optional = false) {
    Array array;
    if (tensor.is_none()) {
        if (optional) return array;
        throw nb::value_error((std::string(what) + " is missing").c_str());
    }
    array.data = memory_of(tensor, what, types, array.type);
    const nb::tuple shape = nb::cast<nb::tuple>(tensor.attr("shape"));
    const nb::tuple stride = nb::cast<nb::tuple>(tensor.attr("stride")());
    array.dims = int(shape.size());
    if (array.dims != dims)
        throw nb::value_error((std::string(what) + " has " + std::to_string(array.dims) + " dimensions instead of " + std::to_string(dims)).c_str());
    const int size = size_of(array.type);
    for (int i = 0; i < dims; ++i) {
        array.shape[i] = nb::cast<int64_t>(shape[i]);
        array.stride[i] = nb::cast<int64_t>(stride[i]) * size;
    }
    if (dims && array.shape[dims - 1] > 1 && array.stride[dims - 1] != size)
        throw nb::value_error((std::string(what) + ": its last dimension has stride " + std::to_string(array.stride[dims - 1] / size) + " instead of 1").c_str());
    return array;
}

inline void require(bool holds, const std::string& message) {
    if (!holds) throw nb::value_error(message.c_str());
}

// float32, contiguous, of exactly this shape; nullptr for None.
inline const float* floats_of(nb::handle tensor, const char* what, std::initializer_list<int64_t> shape) {
    if (tensor.is_none()) return nullptr;
    const Array array = array_of(tensor, what, int(shape.size()), {Type::f32});
    int64_t expected = 4;
    int i = int(shape.size());
    for (auto size = std::rbegin(shape); size != std::rend(shape); ++size) {
        --i;
        require(array.shape[i] == *size, std::string(what) + " has the wrong shape");
        require(array.shape[i] == 1 || array.stride[i] == expected, std::string(what) + " is not contiguous");
        expected *= *size;
    }
    return reinterpret_cast<const float*>(array.data);
}

}  // namespace kvbits
