// What the files that make up the Python module share.
#pragma once

#include "array.hpp"
#include "../run.hpp"

namespace kvbits {

inline const Kernels& kernels_at(int index) {
    const auto& all = all_kernels();
    require(index >= 0 && index < int(all.size()), "there is no instruction set " + std::to_string(index));
    return *all[size_t(index)];
}

void bind_encode(nb::module_&);

}  // namespace kvbits
