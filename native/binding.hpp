// What the files that make up the Python module share.
#pragma once

#include <memory>

#include "array.hpp"
#include "kernels.hpp"

namespace kvbits {

inline const Kernels& kernels_at(int index) {
    const auto& all = all_kernels();
    require(index >= 0 && index < int(all.size()), "there is no instruction set " + std::to_string(index));
    return *all[size_t(index)];
}

// Memory of a thread, kept from call to call.
inline uint8_t* scratch_of_thread(int64_t bytes) {
    thread_local std::unique_ptr<uint8_t[]> memory;
    thread_local int64_t held = 0;
    if (bytes > held) {
        memory.reset(new uint8_t[size_t(bytes)]());
        held = bytes;
    }
    return memory.get();
}

void bind_encode(nb::module_&);

}  // namespace kvbits
