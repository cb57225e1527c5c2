"""The four models of the paper, with GroupNorm wherever a norm is used, two small ones with tanh, two on features that
nobody has learnt, and one for texts.

For any input size and number of classes.

registry   models by name, and `module:factory` for a user's own
parts      what there is a choice of: the activation, and the kind of convolution
cnn        the shallow and the deep convolutional network, S-CNN and D-CNN, and a deep one with linear layers
resnet     ResNet-18
vgg        VGG-16
scattering fixed wavelet features of images, a linear and a small convolutional model on top of them
encoder    a small transformer for texts
hub        models of transformers and timm, and adapters of peft
tuned      encoders to embed: tuned whole, by a head, or in the tangent of a head
yours      whose an error is: where in code of the user's own it arose
running    build a model from a seed, run it where it lives, count what it gets right
"""

from lmdp.models.cnn import DCNN, SCNN, DeepCNN
from lmdp.models.encoder import TinyEncoder
from lmdp.models.hub import TASKS, encoder_of, merged
from lmdp.models.parts import ACTIVATIONS, Parts
from lmdp.models.registry import MODELS, TEXT_MODELS, build, can_import, check_name, module_folder
from lmdp.models.resnet import ResNet18
from lmdp.models.running import Inputs, accuracy, device_of, evaluation, fresh, main_tensor, run, scores_of
from lmdp.models.scattering import ScatterCNN, Scattering, ScatterLinear, Staged
from lmdp.models.tuned import TUNES, Embedder, Probe, Tangent
from lmdp.models.vgg import VGG16

__all__ = [
    "ACTIVATIONS",
    "DCNN",
    "MODELS",
    "SCNN",
    "TASKS",
    "TEXT_MODELS",
    "TUNES",
    "VGG16",
    "DeepCNN",
    "Embedder",
    "Inputs",
    "Parts",
    "Probe",
    "ResNet18",
    "ScatterCNN",
    "ScatterLinear",
    "Scattering",
    "Staged",
    "Tangent",
    "TinyEncoder",
    "accuracy",
    "build",
    "can_import",
    "check_name",
    "device_of",
    "encoder_of",
    "evaluation",
    "fresh",
    "main_tensor",
    "merged",
    "module_folder",
    "run",
    "scores_of",
]
