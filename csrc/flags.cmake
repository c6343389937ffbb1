# How everything here is compiled: the library `oneloop_flags`, which holds nothing but options.
add_library(oneloop_flags INTERFACE)
# Contraction is off so that a multiply and an add mean the same in every kernel: fused ones are written as such.
target_compile_options(oneloop_flags INTERFACE -O3 -Wall -Wextra -ffp-contract=off -fno-math-errno)

# For .ci/run, whose compiler is known: another one may warn of what this one does not, and users are not to suffer for it.
option(ONELOOP_WERROR "Warnings are errors, with GCC" OFF)
if(ONELOOP_WERROR AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(oneloop_flags INTERFACE -Werror)
endif()

# For .ci/sanitize: every byte a kernel touches is checked. Weights are then allocated one by one, so that each has an end.
option(ONELOOP_SANITIZE "AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
if(ONELOOP_SANITIZE)
  target_compile_options(oneloop_flags INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all -O1 -g1)
  target_link_options(oneloop_flags INTERFACE -fsanitize=address,undefined)
  target_compile_definitions(oneloop_flags INTERFACE ONELOOP_SANITIZE)
endif()
