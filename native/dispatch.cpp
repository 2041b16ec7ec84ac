#include "kernels.hpp"

namespace kvbits {

// Adding an instruction set: its file in isa/, its flags in CMakeLists.txt, and its name in both lists here.
extern const Kernels scalar_kernels;
#if defined(KVBITS_X86)
extern const Kernels avx2_kernels, avx512_kernels;
#elif defined(KVBITS_ARM)
extern const Kernels neon_kernels;
#endif

const std::vector<const Kernels*>& all_kernels() {
    static const std::vector<const Kernels*> all = [] {
        std::vector<const Kernels*> found;
        for (const Kernels* kernels : {
#if defined(KVBITS_X86)
                 &avx512_kernels, &avx2_kernels,
#elif defined(KVBITS_ARM)
                 &neon_kernels,
#endif
                 &scalar_kernels})
            if (kernels->supported()) found.push_back(kernels);
        return found;
    }();
    return all;
}

}  // namespace kvbits
