"""The plugin for vLLM without vLLM: what it does to a vLLM that it knows, that it does not know, and that has not asked for it.

vLLM here is a few modules of its names. tests/engines runs the plugin in real ones.
"""

import importlib
import pathlib
import sys
import types

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "client/integrations/vllm"


class EngineCore:
    def __init__(self):
        self.calls = []
        self.model_executor = types.SimpleNamespace()

    def _initialize_kv_caches(self, vllm_config):
        return "stock"

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append(method)
        if method == "fails":
            raise ValueError("after some of them")
        return [method]

    def wake_up(self, tags=None):
        return True

    def add_lora(self, lora_request):
        if lora_request.lora_name == "broken":
            raise ValueError("no such adapter")
        return True

    def remove_lora(self, lora_id):
        return True

    def post_step(self, model_executed):
        pass


def extra_keys(request, start_token_idx, end_token_idx, start_mm_idx):
    """As vLLM makes them: an adapter's name in each block's, the salt in the first one's."""
    keys = [*([request.lora_request.lora_name] if request.lora_request else []), *request.others, *([request.cache_salt] if start_token_idx == 0 and request.cache_salt else [])]
    return tuple(keys) or None, start_mm_idx + 1


@pytest.fixture
def vllm(monkeypatch):
    """{module: its fake}, imported as far as vLLM's front end has when it loads plugins."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.plugins", "vllm.logger", "vllm.v1", "vllm.v1.core",
                                                         "vllm.v1.core.kv_cache_utils")}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    modules["vllm"].__version__ = "0.33.0"
    modules["vllm.plugins"].load_general_plugins = lambda: None
    modules["vllm.logger"].init_logger = lambda name: types.SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    utils = modules["vllm.v1.core.kv_cache_utils"]
    utils.init_none_hash = lambda *_: None
    utils.generate_block_hash_extra_keys = extra_keys
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpool_vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield modules
    for name in [name for name in sys.modules if name.split(".")[0] == "kvpool_vllm"]:
        del sys.modules[name]


@pytest.fixture
def plugin(vllm):
    return importlib.import_module("kvpool_vllm.plugin")


def failure():
    return sys.modules["kvpool_vllm.patches"].failure


def engine_is_imported(monkeypatch, core=EngineCore):
    """vLLM imports its engine when it makes one, after it has loaded plugins."""
    module = types.ModuleType("vllm.v1.engine.core")
    module.EngineCore = type("EngineCore", (core,), {"_initialize_kv_caches": core._initialize_kv_caches}) if core is EngineCore else core
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    return module.EngineCore


def config(scheduler_cls=None, connector=None):
    transfer = connector and types.SimpleNamespace(kv_connector=connector, kv_connector_extra_config={})
    return types.SimpleNamespace(scheduler_config=types.SimpleNamespace(scheduler_cls=scheduler_cls), kv_transfer_config=transfer)


def test_register_imports_nothing(vllm, plugin):
    before = set(sys.modules)
    plugin.register()
    assert set(sys.modules) == before and failure() == ""
    utils = vllm["vllm.v1.core.kv_cache_utils"]
    assert not hasattr(utils.init_none_hash, "kvpool")


def test_register_of_a_vllm_that_is_not_known(vllm, plugin, monkeypatch):
    """vLLM calls it without a try: whatever it raises, nobody's engine starts."""
    engine_is_imported(monkeypatch, type("EngineCore", (), {}))
    plugin.register()
    assert "_initialize_kv_caches" in failure()
    del vllm["vllm.plugins"].load_general_plugins
    plugin.register()
    assert "load_general_plugins" in failure()


@pytest.mark.parametrize("version", ["0.5.0", "0.28.3", "0.33.0", "1.0.0", "dev"])
def test_an_engine_that_has_not_asked_is_as_it_was(vllm, plugin, monkeypatch, version):
    vllm["vllm"].__version__ = version
    plugin.register()
    kind = engine_is_imported(monkeypatch)
    vllm["vllm.plugins"].load_general_plugins()  # As EngineCore's constructor does.
    before = set(sys.modules)
    core = kind()
    for asked in (config(), config("vllm.Other"), config(connector="ExampleConnector")):
        assert core._initialize_kv_caches(asked) == "stock"
    assert set(sys.modules) == before
    assert vars(core).keys() == {"calls", "model_executor"}
    assert not hasattr(vllm["vllm.v1.core.kv_cache_utils"].init_none_hash, "kvpool")


def test_one_that_has_asked_is_met_though_it_was_imported_later(vllm, plugin, monkeypatch):
    plugin.register()
    kind = engine_is_imported(monkeypatch)
    vllm["vllm.plugins"].load_general_plugins()
    vllm["vllm.plugins"].load_general_plugins()
    vllm["vllm"].__version__ = "0.28.3"
    with pytest.raises(RuntimeError, match="0.28.3.*0.29"):
        kind()._initialize_kv_caches(config("kvpool_vllm.Scheduler"))


CONNECTORS = """
class KVConnectorFactory:
    names = {}

    @classmethod
    def register_connector(cls, name, module_path, class_name):
        if name in cls.names:
            raise ValueError(f"{name} is registered")
        cls.names[name] = module_path, class_name
"""


@pytest.mark.parametrize("vllms", [CONNECTORS, "class KVConnectorFactory: pass"], ids=["known", "unknown"])
def test_the_connector_is_known_by_its_name(vllm, plugin, monkeypatch, tmp_path, vllms):
    """--kv-transfer-config '{"kv_connector": "KvPoolConnector"}' needs no path of a module."""
    (tmp_path / "factory.py").write_text(vllms)
    for name in ("vllm.distributed", "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector"):
        module = types.ModuleType(name)
        module.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, name, module)
    plugin.register(), plugin.register()
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    assert name not in sys.modules
    factory = importlib.import_module(name).KVConnectorFactory
    monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # So that it goes with the test.
    assert getattr(factory, "names", None) == ({"KvPoolConnector": ("kvpool_vllm.connector", "KvPoolConnector")} if vllms == CONNECTORS else None)
    plugin.register()  # Where it is imported, and has the name, already.
    assert failure() == ""


def watched(plugin, vllm, monkeypatch):
    plugin.register()
    kind = engine_is_imported(monkeypatch)
    vllm["vllm.plugins"].load_general_plugins()
    core = kind()
    model = types.SimpleNamespace(load_weights=lambda weights: {"all"})
    core.model_executor.driver_worker = types.SimpleNamespace(worker=types.SimpleNamespace(get_model=lambda: model))
    assert core._initialize_kv_caches(config(connector="KvPoolConnector")) == "stock"
    return core, model


class Listener:
    def __init__(self):
        self.heard, self.adapters = 0, []

    def weights_changed(self):
        self.heard += 1

    def adapter_changed(self, number):
        self.adapters.append(number)


def test_every_way_to_change_weights_is_seen(vllm, plugin, monkeypatch):
    core, model = watched(plugin, vllm, monkeypatch)
    listener = Listener()
    importlib.import_module("kvpool_vllm.core").listen(listener)
    count = 0
    for method in ("update_weights", "reload_weights", "load_weights", "my_extension", lambda worker: None):
        assert core.collective_rpc(method, args=(1,)) == [method]
        count += 1
        assert listener.heard == count, method
    with pytest.raises(ValueError, match="after some"):
        core.collective_rpc("fails")
    assert core.wake_up() and model.load_weights([]) == {"all"}
    assert listener.heard == count + 3
    for method in ("get_model_inspection", "compute_weight_checksums", "profile", "list_loras"):
        assert core.collective_rpc(method) == [method]
    assert listener.heard == count + 3
    del listener
    core.wake_up()  # Of an engine that is gone nobody hears.


def test_nobody_listens_where_nobody_would_tell(vllm, plugin):
    with pytest.raises(RuntimeError, match="has not loaded the plugin"):
        importlib.import_module("kvpool_vllm.core").listen(Listener())


def request_with(lora):
    request = types.SimpleNamespace(lora_request=lora, block_hashes=[])
    request.update_block_hashes = lambda: None
    return request


def loaded(keys, lora):
    with keys.loading(lora):
        pass


def lora(path, number=1, **more):
    return types.SimpleNamespace(lora_name="tuned", lora_int_id=number, lora_path=str(path), **more)


@pytest.fixture
def keys(vllm):
    keys = importlib.import_module("kvpool_vllm.keys")
    keys.set_root(b"seed")
    return keys


def adapter(directory, weights):
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def test_an_adapter_whose_files_change_while_it_is_loaded(vllm, keys, tmp_path):
    """Its K and V are of what was loaded: under the new files' key another engine would take them for the new ones'."""
    path = adapter(tmp_path / "a", b"one")
    before = request_with(lora(path))
    ((_, first),) = keys.adapter_keys(before)
    assert keys.adapter_is_the_same(before) and keys.adapter_keys(before) == [("lora", first)]
    adapter(path, b"two")
    # What was asked for before is shared no more: it may have been loaded since.
    assert not keys.adapter_is_the_same(before) and keys.adapter_keys(before) == [("lora", first)]
    after = request_with(lora(path))
    ((_, second),) = keys.adapter_keys(after)
    fresh = keys.adapter_digest(str(path))
    assert second not in (first, fresh) and keys.adapter_is_the_same(after) and keys.adapter_files(after) is None
    # Removed and added, it is loaded from the new files.
    keys.adapter_goes(1)
    loaded(keys, lora(path))
    assert keys.adapter_keys(request_with(lora(path))) == [("lora", fresh)]
    adapter(path, b"three")
    loaded(keys, lora(path))
    assert keys.adapter_keys(request_with(lora(path)))[0][1] not in (fresh, keys.adapter_digest(str(path)))
    loaded(keys, lora(path, load_inplace=True))
    assert keys.adapter_keys(request_with(lora(path))) == [("lora", keys.adapter_digest(str(path)))]


def test_an_adapter_loaded_in_place_has_other_names(vllm, keys, tmp_path):
    one, two = (adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    first, second = (keys.adapter_digest(str(path)) for path in (one, two))
    waits, other = request_with(lora(one)), request_with(lora(two, 2))
    for request in (waits, other):
        keys.update(request)
    assert waits.kvpool_adapter == first
    adapter(one, b"new")
    loaded(keys, lora(one, load_inplace=True))
    assert keys.renamed(1, [waits, other]) == [waits] and waits.kvpool_adapter == keys.adapter_digest(str(one)) != first
    # The same once more is no news. What comes from another directory is not what the request that waits names.
    loaded(keys, lora(one, load_inplace=True))
    assert keys.renamed(1, [waits, other]) == []
    loaded(keys, lora(two, load_inplace=True))
    assert keys.renamed(1, [waits]) == [waits] and keys.adapter_files(waits) is None
    comes = request_with(lora(two))
    keys.update(comes)
    assert comes.kvpool_adapter == second and keys.adapter_is_the_same(comes)
    # What has no name that others know has another one after each load.
    before = waits.kvpool_adapter
    adapter(two, b"three")
    loaded(keys, lora(two, load_inplace=True))
    assert keys.renamed(1, [waits, comes]) == [waits, comes] and waits.kvpool_adapter != before


def test_an_adapter_that_its_requests_load_again(vllm, keys, tmp_path):
    """vLLM does so in each step that has such a request: whatever is loaded then, others of its number are computed by."""
    one, two = (adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    runs, again, comes = request_with(lora(one)), request_with(lora(one, load_inplace=True)), request_with(lora(two, load_inplace=True))
    for request in (runs, again, comes):
        keys.update(request)
    assert not keys.reloads_another(again) and keys.reloads_another(comes)
    assert keys.adapter_is_the_same(runs)
    assert keys.renamed(1, [runs, again, comes]) == [runs, again, comes]
    assert not keys.reloads_another(comes)  # It is known.
    for path in (one, two):
        late = request_with(lora(path))
        keys.update(late)
        assert keys.adapter_files(late) is None
    # Loaded from the second directory while a request would load the first one.
    loaded(keys, lora(two, load_inplace=True))
    keys.renamed(1, [again])
    late = request_with(lora(two))
    keys.update(late)
    assert keys.adapter_files(late) is None


def test_files_that_come_back_prove_nothing(vllm, keys, tmp_path):
    """vLLM may have loaded what was there meanwhile: it does when it has dropped the adapter, and for requests that load it in each step."""
    path = adapter(tmp_path / "a", b"one")
    runs = request_with(lora(path))
    keys.update(runs)
    assert keys.adapter_is_the_same(runs)
    adapter(path, b"two")
    assert not keys.adapter_is_the_same(runs)
    adapter(path, b"one")
    assert not keys.adapter_is_the_same(runs)
    late = request_with(lora(path))
    keys.update(late)
    assert keys.adapter_files(late) is None
    loaded(keys, lora(path, load_inplace=True))
    keys.renamed(1, [late])
    assert keys.adapter_is_the_same(late) and late.kvpool_adapter == keys.adapter_digest(str(path))


def test_what_is_loaded_in_each_step_has_a_name_of_its_own(vllm, keys, tmp_path):
    path, names = adapter(tmp_path / "a", b"one"), set()
    for content in (b"one", b"two", b"three", b"four"):
        adapter(path, content)
        request = request_with(lora(path, load_inplace=True))
        keys.update(request)
        if keys.reloads_another(request):
            keys.renamed(1, [request])
        names.add(request.kvpool_adapter)
        assert not keys.update(request) and request.kvpool_adapter in names
    assert len(names) == 4


def test_a_request_that_was_made_before_its_adapter_was_loaded_anew(vllm, keys, tmp_path):
    path = adapter(tmp_path / "a", b"one")
    for number in (1, 2):
        request = request_with(lora(path, number))
        request.update_block_hashes = lambda: request.block_hashes.extend(keys.adapter_keys(request))
        request.update_block_hashes()
        adapter(path, b"two" * number)
        if number == 1:  # Else it is not loaded, and the files have changed.
            loaded(keys, lora(path, load_inplace=True))
            assert keys.renamed(1, []) == []
        keys.update(request)
        assert request.block_hashes == [("lora", request.kvpool_adapter)]
        assert (request.kvpool_adapter == keys.adapter_digest(str(path))) == (number == 1)


def test_adapters_that_come_and_go_are_seen(vllm, plugin, monkeypatch, tmp_path):
    core, _ = watched(plugin, vllm, monkeypatch)
    listener, keys = Listener(), importlib.import_module("kvpool_vllm.keys")
    importlib.import_module("kvpool_vllm.core").listen(listener)
    path = adapter(tmp_path / "a", b"one")
    assert core.add_lora(lora(path)) and core.remove_lora(1)
    broken = lora(path, load_inplace=True)
    broken.lora_name = "broken"
    with pytest.raises(ValueError):
        core.add_lora(broken)
    assert listener.adapters == [1] * 3
    # There was none, and there is none. Where there was one, nobody knows which of the two files it has.
    assert core.add_lora(lora(path)) and (named := request_with(lora(path)))
    keys.update(named)
    with pytest.raises(ValueError):
        core.add_lora(broken)
    late = request_with(lora(path))
    keys.update(late)
    assert not keys.adapter_is_the_same(named) and keys.adapter_files(late) is None


def test_adapters_are_known_by_content(vllm, keys, tmp_path):
    one, same, other = (adapter(tmp_path / name, weights) for name, weights in (("a", b"x"), ("b", b"x"), ("c", b"y")))
    named = [keys.adapter_keys(request_with(lora(path, number))) for number, path in enumerate((one, same, other))]
    assert named[0] == named[1] != named[2]
    # An id that was another directory's: whose weights are loaded is not known.
    assert keys.adapter_keys(request_with(lora(other, 0))) not in named
    nowhere = keys.adapter_keys(request_with(lora(tmp_path / "nowhere", 9)))
    assert nowhere not in named and nowhere[0][1]


def test_a_root_of_its_own_outlives_the_seed(vllm, keys):
    utils = vllm["vllm.v1.core.kv_cache_utils"]
    utils.BlockHash = bytes
    keys.take_root(bytes)
    assert utils.NONE_HASH == b"seed"
    keys.new_root()
    keys.take_root(bytes)
    private = utils.NONE_HASH
    assert private.startswith(b"seed") and private != b"seed"
    keys.set_root(b"daemon that came back")  # This engine's weights are still not the fingerprint's.
    keys.take_root(bytes)
    assert utils.NONE_HASH.startswith(b"daemon that came back") and utils.NONE_HASH.endswith(private[4:])


def salted(shared, salt="salt", others=(), pooling=False):
    """`shared`: what the request says; (): nothing."""
    arguments = {} if shared == () else {"kvpool_shared_prefix_tokens": shared}
    sampling = None if pooling else types.SimpleNamespace(extra_args=arguments or None)
    return types.SimpleNamespace(cache_salt=salt, others=others, lora_request=None, mm_features=[], sampling_params=sampling,
                                 pooling_params=types.SimpleNamespace(extra_kwargs=arguments or None) if pooling else None)


@pytest.fixture
def made(vllm, keys):
    """made(request): the extra keys of its 4 blocks of 16 tokens, as vLLM's code, which asks by the module's name, makes them."""
    importlib.import_module("kvpool_vllm.patches").take_keys()
    utils = vllm["vllm.v1.core.kv_cache_utils"]

    def made(request):
        blocks, index = [], 7
        for first in range(0, 64, 16):
            extra, index = utils.generate_block_hash_extra_keys(request, first, first + 16, index)
            blocks.append(extra)
        assert index == 11, "vLLM's index of images goes on"
        return blocks
    return made


@pytest.mark.parametrize("pooling", [False, True])
def test_a_salt_counts_from_the_block_behind_what_is_shared(made, pooling):
    soft = ("kvpool.salted.v1", "salt")
    for shared, block in ((1, 0), (15, 0), (16, 1), (31, 1), (40, 2), (63, 3), (64, None), (10**9, None)):
        expected = [(soft,) if i == block else None for i in range(4)]
        request = salted(shared, pooling=pooling)
        assert made(request) == expected, shared
        assert request.cache_salt == "salt"
    # Beside other keys, which it does not stand for.
    assert made(salted(20, others=("image",))) == [("image",), ("image", soft), ("image",), ("image",)]
    assert made(salted(20, others=("kvpool.salted.v1", "salt")))[1] != made(salted((), others=("kvpool.salted.v1", "salt")))[1]


def test_adapters_and_images_are_named_beside_what_vllm_names(keys, made, tmp_path):
    path = adapter(tmp_path / "a", b"one")
    named = ("lora", keys.adapter_digest(str(path)))
    for shared, first, others in (((), (named, "image", "salt"), (named, "image")),
                                  (20, (named, "image"), (named, "image", ("kvpool.salted.v1", "salt")))):
        request = salted(shared, others=("image",))
        request.lora_request = lora(path)
        request.mm_features = [types.SimpleNamespace(identifier="cat", mm_hash="tuned:cat", data=None)]
        assert made(request) == [first, others, *[(named, "image")] * 2]
        assert request.lora_request.lora_name == "tuned" and request.mm_features[0].identifier.startswith("kvpool ")
    keys._seed = None  # No pool: vLLM is as it was.
    request.mm_features[0] = types.SimpleNamespace(identifier="cat")
    assert made(request) == [("tuned", "image", "salt"), *[("tuned", "image")] * 3] and request.mm_features[0].identifier == "cat"


def test_a_request_that_comes_has_keys_of_the_root_that_is_there(vllm, keys, made):
    """vLLM makes requests in a thread of its own, and changes weights in another."""
    utils = vllm["vllm.v1.core.kv_cache_utils"]
    utils.BlockHash = bytes
    request = salted((), salt=None)
    request.block_hashes, request.update_block_hashes = [], lambda: made(request) and request.block_hashes.append(utils.NONE_HASH)
    keys.take_root(bytes)
    request.update_block_hashes()
    (key,) = request.block_hashes
    keys.update(request)
    assert request.block_hashes[0] is key
    keys.new_root()
    keys.take_root(bytes)
    keys.update(request)
    assert request.block_hashes == [utils.NONE_HASH] != [key]
    # One whose first key is made while there is neither the old root nor the new one.
    keys.new_root()
    keys.take_root(lambda root: request.block_hashes.clear() or request.update_block_hashes() or root)
    keys.update(request)
    assert request.block_hashes == [utils.NONE_HASH]


def test_a_salt_without_shared_tokens_is_vllms_own(made, keys):
    for shared in ((), None, 0):
        assert made(salted(shared)) == [("salt",), None, None, None]
    for salt in (None, ""):  # Without a salt it changes nothing.
        assert made(salted(20, salt=salt)) == [None] * 4
    keys._seed = None  # No pool: vLLM is as it was.
    assert made(salted(20)) == [("salt",), None, None, None]


def test_what_a_request_says_when_it_comes_holds(made):
    """Sessions that stream their input have other parameters with each part: keys would go on without a salt."""
    request = salted(60)
    assert made(request)[3] == (("kvpool.salted.v1", "salt"),)
    request.sampling_params.extra_args = {"kvpool_shared_prefix_tokens": 5}
    assert made(request)[3] == (("kvpool.salted.v1", "salt"),)
    request.sampling_params = types.SimpleNamespace(extra_args=None)
    assert made(request) == [None, None, None, (("kvpool.salted.v1", "salt"),)]


def test_an_error_leaves_the_salt_where_it_was(vllm, keys, made):
    request = salted(20, others=None)
    with pytest.raises(TypeError):
        made(request)
    assert request.cache_salt == "salt"


@pytest.mark.parametrize("wrong", [-1, True, False, 1.0, "16", [16]])
def test_shared_tokens_that_are_none_share_nothing(made, caplog, wrong):
    for _ in range(2):
        assert made(salted(wrong)) == [("salt",), None, None, None]
    (line,) = caplog.messages
    assert line.startswith(f"kvpool_shared_prefix_tokens is {wrong!r}; must be an int from 0 on.")
    assert made(salted(wrong, salt=None)) == [None] * 4
