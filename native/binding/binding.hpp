// What the files that make up the Python module share.
#pragma once

#include "../run.hpp"
#include "array.hpp"

namespace kvbits {

const std::initializer_list<Type> element_types = {Type::f32, Type::bf16, Type::f16};
constexpr int most_threads = 1024;

inline const Kernels& kernels_at(int index) {
    const auto& all = all_kernels();
    require(index >= 0 && index < int(all.size()), "there is no instruction set " + std::to_string(index));
    return *all[size_t(index)];
}

inline int threads_of(int threads) { return threads < 1 ? 1 : threads > most_threads ? most_threads : threads; }

template <class T> T cast(nb::handle from, const char* what) {
    T to;
    if (!nb::try_cast(from, to)) throw nb::type_error((std::string(what) + " cannot be " + nb::repr(from).c_str()).c_str());
    return to;
}

// An entry of a dict, or None.
inline nb::handle entry(const nb::dict& from, const char* name) {
    PyObject* found = PyDict_GetItemString(from.ptr(), name);
    return found ? found : Py_None;
}

void bind_layouts(nb::module_&);
void bind_attend(nb::module_&);
void bind_encode(nb::module_&);

}  // namespace kvbits
