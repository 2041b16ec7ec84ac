// The Python module. It checks what it is given; the kernels run without the GIL.

#include "binding.hpp"

NB_MODULE(_native, m) {
    using namespace kvbits;
    nb::set_leak_warnings(false);  // caches may well live until the interpreter exits
    m.doc() = "Kernels of kvbits for the CPU. Private: use kvbits.attend and kvbits.encode.";
    bind_layouts(m);
    bind_attend(m);
    bind_encode(m);
    m.def("names", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : all_kernels()) names.emplace_back(kernels->name);
        return names;
    }, "Instruction sets that this build has and this processor can run, best first.");
    m.def("pool", [] { return std::string(pool_name()); });
    m.def("set_dtypes", [](nb::list all) {
        require(all.size() <= 16, "too many dtypes");
        for (size_t i = 0; i < all.size(); ++i) {
            Py_INCREF(all[i].ptr());  // dtypes live as long as the process
            dtypes[i] = all[i].ptr();
        }
    });
}
