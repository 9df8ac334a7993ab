// Appended to a kernel's text: what the parameters of one instantiation are, and its launch.
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

struct FakeParameter { char kind; unsigned size, alignment; };

template <typename T> constexpr FakeParameter fake_parameter() {
    typedef typename std::remove_const<T>::type Bare;
    char kind = std::is_pointer<Bare>::value ? 'p' : std::is_floating_point<Bare>::value ? 'f'
        : std::is_integral<Bare>::value ? 'i' : 's';
    return {kind, sizeof(T), alignof(T)};
}

template <typename T> struct FakeEntry;
template <typename... A> struct FakeEntry<void (*)(A...)> {
    static constexpr int count = sizeof...(A);
    static constexpr FakeParameter parameters[] = {fake_parameter<A>()...};
    template <int I> using at = typename std::tuple_element<I, std::tuple<A...>>::type;
    template <size_t... I>
    __attribute__((no_sanitize("thread"))) static void call(
        void (*entry)(A...), void** args, std::index_sequence<I...>) {
        entry(*(typename std::remove_const<A>::type*)args[I]...);
    }
};

extern "C" void fake_ignore(const void*);
