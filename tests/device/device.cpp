// A second device over ordinary memory: PyTorch's PrivateUse1 backend, for tests on machines without an accelerator.
//
// Kernels are the host's: a call sees device memory as host tensors over the same bytes, and nothing is copied. What
// would cross the bus of a real device, or make the host wait for it, is counted. Addresses of device memory are
// shifted, so that host code that follows one dies, as it does with CUDA.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using c10::Storage;
using torch::jit::Stack;
using Names = std::unordered_set<std::string>;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;

// ---------------------------------------------------------------------------------------------------- what is counted

enum Crossing { TO_HOST, TO_DEVICE, BETWEEN, SYNCHRONISATION, CROSSINGS };
std::atomic<int64_t> times[CROSSINGS], bytes_over[CROSSINGS];
std::atomic<bool> listened{false};
py::object* listener = nullptr;

void note(Crossing crossing, const std::string& by, int64_t bytes = 0) {
  times[crossing]++;
  bytes_over[crossing] += bytes;
  if (!listened) return;
  py::gil_scoped_acquire gil;
  if (listener) (*listener)(static_cast<int>(crossing), by, bytes);
}

// -------------------------------------------------------------------------------------------------------------- memory

constexpr uintptr_t SHIFT = uintptr_t{1} << 54;  // no process has memory there

void* moved(const void* address, uintptr_t by) {
  return address ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) + by) : nullptr;
}
void* shifted(const void* host) { return moved(host, SHIFT); }
void* unshifted(const void* device) { return moved(device, -SHIFT); }
void release(void* storage) { delete static_cast<Storage*>(storage); }

// Memory of one storage under the address and device of the other kind; it lives as long as either is used.
c10::DataPtr on_device(const Storage& host, Device where) {
  return {shifted(host.data()), new Storage(host), &release, where};
}
c10::DataPtr on_host(const Storage& device) {
  return {unshifted(device.data()), new Storage(device), &release, Device(c10::kCPU)};
}

thread_local DeviceIndex current = 0;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* host = c10::GetCPUAllocator();
    return on_device(Storage(Storage::use_byte_size_t(), bytes, host->allocate(bytes), host, true), {KIND, current});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(unshifted(to), unshifted(from), count);
  }
} allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

// ------------------------------------------------------------------------------------------------- devices and streams

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "there is no device ", device, ": this backend has ", int(DEVICES));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  // One stream per device, in step with the host: nobody ever has to wait, but who asks to is counted.
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { note(SYNCHRONISATION, "event.synchronize"); }
  void synchronizeStream(const c10::Stream&) const override { note(SYNCHRONISATION, "stream.synchronize"); }
  void synchronizeDevice(DeviceIndex) const override { note(SYNCHRONISATION, "synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// PyTorch starts the threads that compute devices' gradients at a process's first backward pass, and never again.
struct Engine final : torch::autograd::Engine {
  static void start_threads() {
    auto& engine = torch::autograd::Engine::get_default_engine();
    if ((engine.*(&Engine::device_ready_queues_)).empty()) (engine.*(&Engine::start_device_threads))();
  }
};

// ---------------------------------------------------------------------------------------------------------- randomness

struct Generator final : c10::GeneratorImpl {  // a host generator that says it is the device's
  explicit Generator(DeviceIndex index, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(KIND, index), c10::DispatchKeySet(DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.unsafeGetGeneratorImpl()->seed(); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device_.index(), host.clone()); }
  at::Generator host;
};

const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> generators;
    for (DeviceIndex i = 0; i < DEVICES; i++) generators.push_back(at::make_generator<Generator>(i));
    return generators;
  }();
  return all.at(index < 0 ? current : index);
}

at::Generator& host_generator(const at::Generator& device) {
  return static_cast<Generator*>(device.unsafeGetGeneratorImpl())->host;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({KIND, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return Guard().exchangeDevice({KIND, index}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = allocator.allocate(bytes);
    allocator.copy_data(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// --------------------------------------------------------------------------- kernels: the host's, over the same memory

c10::TensorImpl* impl(const Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }
bool same(const Storage& one, const Storage& two) { return one.unsafeGetStorageImpl() == two.unsafeGetStorageImpl(); }

struct Call {  // the device's tensors and storages of one call, and the host's for each
  std::vector<std::pair<Tensor, Tensor>> tensors;
  std::vector<std::pair<Storage, Storage>> storages;

  Tensor host(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != KIND) return tensor;
    for (auto& [device, host] : tensors)
      if (device.is_same(tensor)) return host;
    tensors.emplace_back(tensor, at::detail::make_tensor<c10::TensorImpl>(
                                     host(tensor.storage()), c10::DispatchKeySet(DispatchKey::CPU), tensor.dtype()));
    return shaped(tensors.back().second, tensor);
  }

  Tensor device(const Tensor& tensor, Device where) {
    if (!tensor.defined() || tensor.device().type() == KIND) return tensor;
    for (auto& [device, host] : tensors)
      if (host.is_same(tensor)) return device;
    TORCH_CHECK(tensor.layout() == at::kStrided, "this device has no tensors of layout ", tensor.layout());
    auto storage = device(tensor.storage(), where);
    for (auto& [device, host] : tensors)
      if (same(device.storage(), storage))
        return shaped(at::detail::make_tensor<c10::TensorImpl>(
                          c10::TensorImpl::VIEW, std::move(storage), device.key_set(), tensor.dtype()),
                      tensor);
    return shaped(at::detail::make_tensor<c10::TensorImpl>(
                      std::move(storage), c10::DispatchKeySet(DispatchKey::PrivateUse1), tensor.dtype()),
                  tensor);
  }

  // Who writes into a tensor may give it another shape, or its storage other memory.
  void write_back() {
    for (auto& [device, host] : storages)
      if (host.data() != unshifted(device.data())) {
        device.set_data_ptr_noswap(on_device(host, device.device()));
        device.set_nbytes(host.nbytes());
      }
    for (auto& [device, host] : tensors)
      if (device.sizes() != host.sizes() || device.strides() != host.strides())
        impl(device)->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

 private:
  static Tensor shaped(Tensor tensor, const Tensor& like) {
    impl(tensor)->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    tensor._set_conj(like.is_conj());
    tensor._set_neg(like.is_neg());
    if (impl(like)->is_wrapped_number()) impl(tensor)->set_wrapped_number(true);
    return tensor;
  }

  Storage host(const Storage& storage) {
    for (auto& [device, host] : storages)
      if (same(device, storage)) return host;
    Storage host(Storage::use_byte_size_t(), storage.nbytes(), on_host(storage), c10::GetCPUAllocator(), true);
    storages.emplace_back(storage, host);
    return host;
  }

  Storage device(const Storage& storage, Device where) {
    for (auto& [device, host] : storages)
      if (same(host, storage)) return device;
    Storage device(Storage::use_byte_size_t(), storage.nbytes(), on_device(storage, where), &allocator, true);
    storages.emplace_back(device, storage);
    return device;
  }
};

const Names INDEXING{"aten::index",      "aten::_unsafe_index",    "aten::index_put",
                     "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"};
const Names TAKES_HOST_SCALARS{"aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::index_fill",
                               "aten::index_fill_", "aten::where", "aten::lerp", "aten::lerp_", "aten::isin"};
const Names SHAPED_BY_VALUES{"aten::nonzero", "aten::_unique", "aten::_unique2", "aten::unique_dim",
                             "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::masked_select",
                             "aten::bincount", "aten::multinomial", "aten::histc",
                             "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig", "aten::linalg_lstsq"};

bool may_stay_on_host(const OperatorHandle& op, const c10::Argument& argument, const Tensor& tensor, bool listed) {
  const auto& name = op.schema().name();
  if (impl(tensor)->is_wrapped_number()) return true;
  if (INDEXING.count(name) && argument.name() == "indices") return true;
  bool written = argument.alias_info() && argument.alias_info()->isWrite();
  return tensor.dim() == 0 && !written && !listed &&
         (op.hasTag(at::Tag::pointwise) || TAKES_HOST_SCALARS.count(name) || INDEXING.count(name) ||
          name.rfind("aten::_foreach_", 0) == 0);
}

bool is_mask(const Tensor& tensor) { return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte; }

// The one device of a call's tensors (CUDA's rule: host tensors only where they are scalars or indices).
std::optional<Device> common_device(const OperatorHandle& op, c10::ArrayRef<IValue> given) {
  std::optional<Device> device, other;
  auto see = [&](size_t i, const Tensor& tensor, bool listed) {
    if (!tensor.defined()) return;
    if (tensor.device().type() != KIND && may_stay_on_host(op, op.schema().arguments()[i], tensor, listed)) return;
    if (!device) device = tensor.device();
    if (*device != tensor.device()) other = tensor.device();
  };
  for (size_t i = 0; i < given.size(); i++) {
    if (given[i].isTensor()) see(i, given[i].toTensor(), false);
    else if (given[i].isList())
      for (const IValue& element : given[i].toListRef())
        if (element.isTensor()) see(i, element.toTensor(), true);
  }
  TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
              " and ", *other, "! (in ", op.schema().name(), ")");
  return device;
}

// What CUDA's kernel of this name does besides computing: fetch a value, wait for a size, send indices over.
void count(const OperatorHandle& op, c10::ArrayRef<IValue> given) {
  const auto& name = op.schema().name();
  if (SHAPED_BY_VALUES.count(name)) note(SYNCHRONISATION, name);
  if (name == "aten::equal") {
    note(TO_HOST, name, 1);
    note(SYNCHRONISATION, name);
  }
  if (name == "aten::repeat_interleave" && given[1].isNone()) note(SYNCHRONISATION, name);  // how long is the result?
  if (name == "aten::normal" && given[1].isTensor()) note(SYNCHRONISATION, name);  // is every deviation positive?
  if (!INDEXING.count(name)) return;
  bool masks_on_device = false;
  for (const IValue& element : given[1].toListRef()) {
    if (!element.isTensor() || !element.toTensor().defined()) continue;
    const auto& index = element.toTensor();
    if (index.device().type() != KIND) note(TO_DEVICE, name, index.nbytes());
    else masks_on_device |= is_mask(index);
  }
  bool fills = given.size() > 2 && given[2].isTensor() && given[2].toTensor().numel() == 1 &&
               given[2].toTensor().is_cpu() && !given[3].toBool();
  if (masks_on_device && !fills) note(SYNCHRONISATION, name);
}

// While it lives, what an operator draws of the host's default generator is drawn of the device's.
struct Lent {
  explicit Lent(const at::Generator& device) : lender(host_generator(device)), before(host.get_state()) {
    host.set_state(lender.get_state());
  }
  ~Lent() {
    lender.set_state(host.get_state());
    host.set_state(before);
  }
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator& lender;
  Tensor before;
};

void call_on_host(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = schema.arguments().size(), returns = schema.returns().size();
  auto given = torch::jit::last(*stack, arguments);
  auto device = common_device(op, given);
  TORCH_CHECK(!device || device->type() == KIND, "Expected a '", *device, "' generator for a tensor of ", *device,
              " but found one of another device (in ", schema.name(), ")");  // what else would lead here?
  count(op, given);
  for (const IValue& value : given)
    if (!device && value.isDevice()) device = value.toDevice();
  if (!device || !device->has_index()) device = Device(KIND, current);

  Call call;
  bool draws_unasked = op.hasTag(at::Tag::nondeterministic_seeded);
  const auto first = stack->size() - arguments;
  for (size_t i = 0; i < arguments; i++) {
    IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> hosts;
      for (const IValue& element : value.toListRef()) hosts.push_back(call.host(element.toTensor()));
      value = std::move(hosts);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> hosts;
      for (const IValue& element : value.toListRef())
        hosts.push_back(element.isTensor() ? std::optional(call.host(element.toTensor())) : std::nullopt);
      value = std::move(hosts);
    } else if (value.isDevice()) {
      value = Device(c10::kCPU);
    } else if (schema.arguments()[i].type()->str().find("Generator") == 0) {
      auto generator = value.isNone() ? default_generator(device->index()) : value.toGenerator();
      TORCH_CHECK(generator.device() == *device, "Expected a '", *device, "' generator but found one of '",
                  generator.device(), "' (in ", schema.name(), ")");
      value = host_generator(generator);
      draws_unasked = false;
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<Lent> lent;
    if (draws_unasked) lent.emplace(default_generator(device->index()));
    op.callBoxed(stack);
  }
  call.write_back();
  for (size_t i = stack->size() - returns; i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.device(value.toTensor(), *device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> devices;
      for (const IValue& element : value.toListRef()) devices.push_back(call.device(element.toTensor(), *device));
      value = std::move(devices);
    }
  }
}

OperatorHandle named(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const OperatorHandle&, Stack* stack) { call_on_host(named("aten::convolution"), stack); }

void convolution_backward(const OperatorHandle&, Stack* stack) {
  const auto first = stack->size() - 10;
  auto channels = (*stack)[first].toTensor().size(1);
  stack->insert(stack->begin() + first + 3, IValue(c10::List<int64_t>({channels})));
  call_on_host(named("aten::convolution_backward"), stack);
}

// ------------------------------------------------------------------------------------------ memory, copies and scalars

const c10::DispatchKeySet KEYS(DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  bool from_device = self.device().type() == KIND, to_device = dst.device().type() == KIND;
  if (dst.numel() && self.device() != dst.device())
    note(!to_device ? TO_HOST : !from_device ? TO_DEVICE : BETWEEN, "copy", dst.nbytes());
  Call call;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  call.host(dst).copy_(call.host(self));
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar read_scalar(const Tensor& self) {
  note(TO_HOST, "item", self.itemsize());
  note(SYNCHRONISATION, "item");
  return Call().host(self).item();
}

Tensor& set_part(Tensor& self, Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  c10::DimVector strides(stride);
  if (strides.empty() && !size.empty()) strides = c10::contiguous_strides(size);
  auto needed = at::detail::computeStorageNbytes(size, strides, self.itemsize(), offset);
  if (needed > storage.nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, needed);
  impl(self)->set_storage_keep_dtype(std::move(storage));
  impl(self)->set_sizes_and_strides(size, strides, offset);
  return self;
}

Tensor& set_storage(Tensor& self, Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_part(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  return set_part(self, Storage(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {1});
}

int64_t attend_plainly(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return 0;  // by products and softmax, which are kernels of this device
}

Tensor no_copy_zeros(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  return at::zeros(size, at::TensorOptions().dtype(dtype).device(device.value_or(Device(KIND, current))));
}

// ------------------------------------- cells of recurrent layers: PyTorch expects them of a device; the host has none

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Maybe = std::optional<Tensor>;

Tensor with(const Tensor& gates, const Maybe& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor sum_of_rows(const Tensor& grad, bool wanted) { return wanted ? grad.sum(0) : Tensor(); }

Three lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& c, const Maybe& input_bias,
                const Maybe& hidden_bias) {
  auto gates = (with(input, input_bias) + with(hidden, hidden_bias)).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  auto next = f * c + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

Three lstm_cell_backward(const Maybe& grad_h, const Maybe& grad_c, const Tensor& c, const Tensor& next,
                         const Tensor& kept, bool biased) {
  if (!(grad_h && grad_h->defined()) && !(grad_c && grad_c->defined())) return {};
  auto gates = kept.chunk(4, 1);
  auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  auto t = next.tanh(), dh = grad_h && grad_h->defined() ? *grad_h : at::zeros_like(next);
  auto dc = with(dh * o * (1 - t * t), grad_c);
  auto grads = at::cat({dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {grads, dc * f, sum_of_rows(grads, biased)};
}

Two gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& h, const Maybe& input_bias,
             const Maybe& hidden_bias) {
  auto x = with(input, input_bias).chunk(3, 1), y = with(hidden, hidden_bias).chunk(3, 1);
  auto r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid(), n = (x[2] + r * y[2]).tanh();
  return {n + z * (h - n), at::cat({r, z, n, h, y[2]}, 1)};
}

Five gru_cell_backward(const Tensor& grad, const Tensor& kept, bool biased) {
  auto parts = kept.chunk(5, 1);
  auto &r = parts[0], &z = parts[1], &n = parts[2], &h = parts[3], &y = parts[4];
  auto dn = grad * (1 - z) * (1 - n * n), dz = grad * (h - n) * z * (1 - z), dr = dn * y * r * (1 - r);
  auto input = at::cat({dr, dz, dn}, 1), hidden = at::cat({dr, dz, dn * r}, 1);
  return {input, hidden, grad * z, sum_of_rows(input, biased), sum_of_rows(hidden, biased)};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read_scalar);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_efficientzerotensor", &no_copy_zeros);
  m.impl("_fused_sdp_choice", &attend_plainly);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// Whatever the host has a kernel for is one kernel here too, and not composed of others.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
  }
}

// Copies resolve what is lazily conjugated or negated, as the host's do.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

namespace at::autocast {  // the lists that CUDA casts by

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SINGLE_IF_UNSAID(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_IF_UNSAID)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.attr("DEVICES") = int(DEVICES);
  m.def("start_threads", &Engine::start_threads);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](DeviceIndex index) { Guard().setDevice({KIND, index}); });
  m.def("synchronize", [] { Guard().synchronizeDevice(current); });
  m.def("default_generator", [](DeviceIndex index) { return default_generator(index); });
  m.def("counts", [] {
    std::vector<std::pair<int64_t, int64_t>> all;
    for (int i = 0; i < CROSSINGS; i++) all.emplace_back(times[i].load(), bytes_over[i].load());
    return all;
  });
  m.def("listen", [](py::object who) {
    if (!listener) listener = new py::object;
    listened = !who.is_none();
    *listener = std::move(who);
  });
}
